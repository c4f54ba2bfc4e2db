"""Writes the perplexities of this folder with transformers, in float32 on the CPU.

    python perplexity.py            # needs torch, transformers, tokenizers

held-out.txt
    a book of the generator of the shipped checkpoint, with a seed that nothing was trained on.
perplexity.json
    cases: text (so many bytes of held-out.txt; 0: all), stride (0: windows side by side), tokens (of the text, the
    leading </s> included), scored (those that the mean is over) and perplexity. With half (tokens of a window), the windows
    are those of llama.cpp's perplexity: full windows side by side, each with </s> in place of its first token, and the
    mean is over the tokens after the one in the middle.

The windows are those of transformers' page "Perplexity of fixed-length models". The page weighs the mean of each
window by one token less than the window has targets. In all windows but the first of a sliding one that is one too
few, since the token before the first target is in the window too. Here a mean counts for as many as it is over.
"""

import json
import math
import os
import random
import sys

import torch
from transformers import AutoTokenizer, OPTForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = os.path.join(HERE, "..", "..", "..", "examples", "opt", "tiny")
SEED = 4 * 10**9  # training has those below 2 * 10**5 and 62 drawn bits, the vocabulary 10**9 and up


@torch.no_grad()
def perplexity(model, ids, size, stride):
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + size, len(ids))
        window = torch.tensor([ids[begin:end]])
        target = window.clone()
        target[:, :len(window[0]) - (end - before)] = -100
        scored = int((target[:, 1:] != -100).sum())
        if scored:
            total += model(window, labels=target, use_cache=False).loss.item() * scored
            count += scored
        before = end
        if end == len(ids):
            break
    return math.exp(total / count), count


@torch.no_grad()
def halves(model, ids, size, begin):
    total, count = 0.0, 0
    for end in range(size, len(ids) + 1, size):
        window = ids[end - size:end]
        logits = model(torch.tensor([[begin] + window[1:]]), use_cache=False).logits[0].double()
        p = logits.log_softmax(-1)
        for i in range(size // 2 + 1, size):
            total -= p[i - 1, window[i]].item()
            count += 1
    return math.exp(total / count), count


def main():
    sys.path.insert(0, TINY)
    import stories
    text = stories.Book(random.Random(SEED)).write(20_000).text() + "\nThe end.\n"
    with open(os.path.join(HERE, "held-out.txt"), "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = OPTForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    size, cases = model.config.max_position_embeddings, []
    for part, stride in (0, 0), (9000, 512), (9000, 2047), (700, 0), (2, 1):
        ids = tokenizer((text.encode()[:part] if part else text.encode()).decode()).input_ids
        value, scored = perplexity(model, ids, size, stride or size)
        exact, _ = perplexity(model.double(), ids, size, stride or size)
        model.float()
        print(f"{len(ids)} tokens, stride {stride}: {value}, {exact} in float64")
        assert abs(value - exact) < 2e-5
        cases.append({"text": part, "stride": stride, "tokens": len(ids), "scored": scored, "perplexity": value})
    for part, size in (0, 512), (9000, 129), (700, 170):
        ids = tokenizer((text.encode()[:part] if part else text.encode()).decode()).input_ids
        value, scored = halves(model, ids, size, ids[0])
        print(f"{len(ids)} tokens, halves of {size}: {value}")
        cases.append({"text": part, "half": size, "tokens": len(ids), "scored": scored, "perplexity": value})
    with open(os.path.join(HERE, "perplexity.json"), "w", encoding="utf-8", newline="\n") as f:
        f.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()
