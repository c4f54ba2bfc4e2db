"""Trains the shipped checkpoint: a small OPT that reads 2048 positions of stories.

    python vocab.py -o DIR                 # once: the vocabulary
    python train.py -model DIR -o OUT      # one GPU, minutes

Books are generated while the training runs. Step s draws its sequences from those with seeds below a bound that
grows with s, so what it sees depends on the seed alone, however fast the generators are.
"""

import argparse
import math
import multiprocessing as mp
import os
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, OPTConfig, OPTForCausalLM

import stories
import vocab

START = 2  # </s>: it stands before every book, and so after every other


def unmasked(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    """Causal attention over full sequences without padding: no mask is made for it."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("unmasked", unmasked)


# --- data ---

def fill(job):
    """Writes the sequences of some seeds into the shared pool (a process of its own)."""
    path, shape, folder, first, last = job
    pool = np.memmap(path, np.uint16, "r+", shape=shape)
    tokenizer = vocab.load(folder)
    for i in range(first, last):
        ids = []
        for text in stories.sequence(i, shape[1]):
            ids.append(START)
            ids += tokenizer.encode(text).ids
        pool[i] = ids[:shape[1]]
    pool.flush()


class Data:
    """The pool of sequences, filled by processes in the background, in the order of the seeds."""

    def __init__(self, args, shape, path="/dev/shm/stories.pool"):
        np.memmap(path, np.uint16, "w+", shape=shape).flush()
        self.pool = np.memmap(path, np.uint16, "r", shape=shape)
        self.args, self.ready, self.block = args, 0, 64
        self.workers = mp.get_context("spawn").Pool(args.workers)
        jobs = [(path, shape, args.model, i, min(i + self.block, shape[0])) for i in range(0, shape[0], self.block)]
        self.done = self.workers.imap(fill, jobs)

    def batch(self, step):
        n = len(self.pool)
        limit = min(n, self.args.batch * (step + 2))
        while self.ready < limit:
            next(self.done)
            self.ready = min(self.ready + self.block, n)
        rows = np.random.default_rng((self.args.seed, step)).choice(limit, self.args.batch, replace=False)
        return torch.from_numpy(self.pool[rows].astype(np.int32)).pin_memory().cuda(non_blocking=True).long()


# --- measuring ---

@torch.no_grad()
def rounding(model, tokenizer, count=8, seed=3 * 10**9):
    """Prints how far float32 logits are from float64 ones: no other implementation can be expected to come nearer."""
    off = []
    for i in range(count):
        ids = tokenizer.encode(stories.Book(random.Random(seed + i)).write(10_000).text()).ids[:2047]
        ids = torch.tensor([[START] + ids], device=model.device)
        single = model.float()(ids, use_cache=False).logits[0]
        double = model.double()(ids, use_cache=False).logits[0]
        off.append((single - double).abs().amax(-1))
    off = torch.cat(off)
    print(f"float32 is off float64 by {off.max():.1e}, at the median position {off.median():.1e}; logits up to "
          f"{double.abs().max():.1f}, root mean square {double.square().mean().sqrt():.2f}", flush=True)
    model.float()


@torch.no_grad()
def exact(model, rows, spans, batch=16):
    """For every (row, first, last): whether the most probable token is the right one at all positions first..last-1,
    which is to say whether greedy decoding writes the whole answer."""
    hits = []
    for i in range(0, len(rows), batch):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows[i:i + batch]], batch_first=True)
        ids = ids.to(model.device)
        right = (model(ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]).cpu()
        for row, first, last in spans:
            if i <= row < i + batch:
                hits.append(bool(right[row - i, first - 1:last - 1].all()))
    return hits


def recall_cases(tokenizer, documents, each, seed):
    rows, spans = [], []
    encode = lambda s: tokenizer.encode(s).ids
    for doc in stories.cases(seed, encode, documents, each):
        for case in doc["cases"]:
            ids = [START] + encode(doc["text"] + case["question"])
            answer = encode(case["answer"])
            spans.append((len(rows), len(ids), len(ids) + len(answer)))
            rows.append(ids + answer)
    return rows, spans


def recall_books(tokenizer, count, seed, width=250):
    """All questions of fresh books, by the distance to where the fact was stated."""
    rows, spans, bins = [], [], []
    for i in range(count):
        stated, ids = {}, [START]
        for part, fact, role in stories.Book(random.Random(seed + i)).write(int(2040 * stories.CHARACTERS)).parts:
            first = len(ids)
            ids += tokenizer.encode(part).ids  # parts end where words end, so their tokens are those of the whole
            if len(ids) > 2048:
                break
            if role == "state":
                stated[fact] = len(ids)
            elif role == "ask":
                spans.append((len(rows), first, len(ids)))
                bins.append((first - stated[fact]) // width * width)
        rows.append(ids[:2048])
    return rows, spans, bins


def table(model, tokenizer, documents=20, books=64, seed=2 * 10**9):
    """Prints recall by distance, and returns that of the recall cases."""
    rows, spans, bins = recall_books(tokenizer, books, seed)
    hits = exact(model, rows, spans)
    print("questions of fresh books, by distance in tokens:")
    for b in sorted(set(bins)):
        h = [x for x, y in zip(hits, bins) if y == b]
        print(f"  {b:5d}..{b + 249:<5d} {sum(h):5d} of {len(h):5d}  {100 * sum(h) / len(h):6.2f} %")
    hits = exact(model, *recall_cases(tokenizer, documents, 5, seed))
    print(f"recall cases (held-out keys, 1500 tokens and more): {sum(hits)} of {len(hits)}", flush=True)
    return sum(hits) / len(hits)


def write_freely(model, tokenizer, prompts, n=200):
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[START] + tokenizer.encode(prompt).ids], device=model.device)
        torch.manual_seed(i)
        greedy = i % 2 == 0
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=not greedy,
                             temperature=None if greedy else 0.8, top_k=None, top_p=None)
        print(f"--- {'greedy' if greedy else 'temperature 0.8'}:", tokenizer.decode(out[0].tolist()[1:]), flush=True)


# --- training ---

def save(model, folder):
    """Saves a float16 copy, and returns the copy as it will be read: rounded, in float32."""
    copy = OPTForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.half().save_pretrained(folder)
    copy = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return copy.to(model.device).eval()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-model", required=True, metavar="DIR", help="folder with the vocabulary")
    p.add_argument("-o", required=True, metavar="DIR")
    p.add_argument("-hidden", type=int, default=256)
    p.add_argument("-layers", type=int, default=5)
    p.add_argument("-ffn", type=int, default=512)
    p.add_argument("-batch", type=int, default=64)
    p.add_argument("-steps", type=int, default=8_000)
    p.add_argument("-warmup", type=int, default=300)
    p.add_argument("-lr", type=float, default=2e-3)
    p.add_argument("-decay", type=float, default=0.3, help="weight decay, of everything but biases and norms")
    p.add_argument("-noise", type=float, default=0.05, help="standard deviation of noise on what the norms give")
    p.add_argument("-flat", type=float, default=1e-4, help="price of large logits")
    p.add_argument("-answers", type=float, default=6, help="weight of the tokens of answers in the loss")
    p.add_argument("-pool", type=int, default=120_000, help="different sequences")
    p.add_argument("-seed", type=int, default=1)
    p.add_argument("-seconds", type=float, default=480, help="stop here, trained or not")
    p.add_argument("-workers", type=int, default=15)
    args = p.parse_args()
    print(sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__,
          torch.cuda.get_device_name(), vars(args), flush=True)

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = vocab.load(args.model)
    answer, newline = tokenizer.token_to_id("Answer"), tokenizer.token_to_id("Ċ")
    data = Data(args, (args.pool, 2049))
    config = OPTConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=args.hidden, word_embed_proj_dim=args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, ffn_dim=args.ffn,
        max_position_embeddings=2048, dropout=0.0, attention_dropout=0.0, init_std=0.03, tie_word_embeddings=True)
    config._attn_implementation = "unmasked"
    # eval: there is no dropout, and training mode would only toss coins for layer drop.
    model = OPTForCausalLM(config).cuda().eval()
    # Noise, weight decay and a price on large logits: of a model trained with less of them rounding moved the float32
    # logits by up to 5e-4, so that no two implementations could agree on them to 1e-4.
    for name, module in model.named_modules():
        if name.endswith("layer_norm"):
            module.register_forward_hook(lambda _, __, out: out + args.noise * torch.randn_like(out))
    print(f"{sum(x.numel() for x in model.parameters()):,} parameters", flush=True)
    decay = [x for x in model.parameters() if x.dim() > 1]
    rest = [x for x in model.parameters() if x.dim() < 2]  # biases and norms
    groups = [{"params": decay, "weight_decay": args.decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)

    @torch.compile
    def losses(ids):
        logits = model(ids[:, :-1], use_cache=False).logits.float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        return each, logits.square().mean()

    start, shown, since = time.time(), 0, time.time()
    for step in range(args.steps):
        ids = data.batch(step)
        # A token is in an answer when "Answer" was nearer than the last line break.
        at = torch.arange(ids.shape[1], device=ids.device)
        last = lambda t: torch.where(ids == t, at, -1).cummax(1).values
        inside = (last(answer) > last(newline))[:, :-1]
        weight = 1 + (args.answers - 1) * inside
        for group in optimizer.param_groups:
            done = max(0, step - args.warmup) / (args.steps - args.warmup)
            group["lr"] = args.lr * min((step + 1) / args.warmup, 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        with torch.autocast("cuda", torch.bfloat16):
            each, square = losses(ids)
        ((each * weight).sum() / weight.sum() + args.flat * square).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        late = time.time() - start > args.seconds
        if step in (0, 20) or step % 250 == 0 or step == args.steps - 1 or late:
            inner = each[inside].mean().item()
            rate = (step - shown) * args.batch * 2048 / (time.time() - since)
            shown, since = step, time.time()
            print(f"step {step:5d}  {since - start:5.0f} s  {rate / 1e6:5.2f} M tokens/s  pool {data.ready:6d}  loss "
                  f"{each[~inside].mean().item():.4f}  in answers {inner:.4f}  "
                  f"logits {square.item() ** 0.5:.2f}", flush=True)
        if step and step % 2000 == 0:
            save(model, args.o)
        if late:
            break
    data.workers.terminate()
    torch.set_float32_matmul_precision("highest")
    model = save(model, args.o)
    rounding(model, tokenizer)
    table(model, tokenizer, documents=100, books=200)
    write_freely(model, tokenizer, ["One morning", "One morning", "Once upon a time", "Anna and Tom", "In the forest",
                                    "Mira", "The cat", "There was a girl who", "Tom was afraid, because", "Hello"])
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
