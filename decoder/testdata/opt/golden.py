"""Writes the golden files of this folder with transformers, in float32 on the CPU.

    python golden.py            # needs torch, transformers, tokenizers
    python golden.py galactica  # one of the random checkpoints alone; the others, and versions, stay as they are

golden.json
    logits   cases: model (a folder of checkpoints; "../tiny" is the shipped model), ids (token ids of each sequence of a batch, the leading
             </s> included), positions (of each sequence, those whose logits are kept), vocab, and file: raw
             little-endian float32, one row of vocab logits for each kept position, sequence after sequence.
             chunk, where given, is a size of pieces in which the prompt is to be read.
    greedy   cases: prompt (text), ids (its tokens, the leading </s> included), next (the 200 ids of the greedy
             continuation), text (what they say), margin (the least distance between the two largest logits on the way).
    tokens   cases: model, ids, and next: the 20 ids of the greedy continuation of a random checkpoint, and margin.
decoder/tokenizer/testdata/shipped.json
    pairs of text and ids of the shipped vocabulary, without the leading </s>; the ids decode to the text.
recall.json (from stories.py -cases of the shipped model, checked here)
    documents: text, tokens (with the leading </s>) and cases; a case is question (to be put after the text), answer
    (what greedy decoding continues with) and distance (tokens from the end of the fact to the question).

A sequence of a ragged batch is computed alone, so no padding can reach its logits. The random checkpoints have all
their weights drawn, biases and norms too, so that none of them can be left out unnoticed.
"""

import json
import os
import shutil
import sys

import torch
import transformers
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..", "..")
TINY = os.path.join(ROOT, "examples", "opt", "tiny")
CHECKPOINTS = os.path.join(HERE, "checkpoints")  # a Go module of its own, so that go get leaves it out
BOOK = (
    "Mira lives in the old mill by the river. The key of Mira is in the green box. Tom works as a baker. The dog "
    "of Tom is called Rex. Lena owns seven goats.\nOne morning Tom and Lena went to the market. There were so many "
    "people that they could hardly move. Tom wanted to buy a straw hat. \"How much does it cost?\" he asked. "
    "\"Five coins,\" said the seller. On the way back they met Mira. \"You have a good eye,\" she said.\n")
STRINGS = [
    "", " ", "\n", "Hello world", "Question: Where is the key of Mira?\nAnswer: The key of Mira is in the green box.",
    "Hello, I'm a language model,", "  leading  spaces\n\n\tand tabs   ", "naïve café — “quotes” 日本語テキスト",
    "emoji 👩‍👩‍👧 🎉!!! 123 4567 3.14159", "don't we'll they've I'd it's HE'S 'tis ''s",
    "x=1;\r\n if (a<b) { return a[b]; }   \n", "Ünïcödé ٣٤٥ ½ Ⅷ \u00a0nbsp\u2003em", "a" * 50 + " " * 7 + "b",
    "\u200bzero\u200dwidth\ufeff", "tab\tnew\nform\x0cvertical\x0bnull\x00bell\x07", "e\u0301 vs \u00e9; Å vs Å",
    "١٢٣ १२३ ²³ ₁", "Mira's Mira’s MIRA'S mira'S", "The  key\u3000of\u2028Tom\u0085is 47.\n \n  Q",
    "\U0010ffff\ue000\u0378 ǅ ꙮ",
    "one,two;three:four!five?six(seven)eight[nine]", "    indented\n        more", "ſ'ſ 'ſ 'LL 'Ve",
]


def f32(name, rows):
    with open(os.path.join(HERE, name), "wb") as f:
        f.write(rows.numpy().astype("<f4").tobytes())


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def case(out, name, folder, model, batch, positions=None, **more):
    """Adds a case, and says how far float32 is from float64."""
    positions = positions or [list(range(len(ids))) for ids in batch]
    wide = model.double()
    exact = [logits(wide, ids)[kept] for ids, kept in zip(batch, positions)]
    model = wide.float()
    rows = [logits(model, ids)[kept] for ids, kept in zip(batch, positions)]
    rows, exact = torch.cat(rows), torch.cat(exact)
    print(f"{name}: {tuple(rows.shape)}, root mean square {rows.square().mean().sqrt():.3f}, "
          f"largest {rows.abs().max():.2f}, off float64 by {(rows - exact).abs().max():.1e}")
    assert (rows - exact).abs().max() < 3e-5  # far less than what the tests allow, 1e-4
    f32(name + ".f32", rows)
    out.append({"name": name, "model": folder, "ids": batch, "positions": positions, "vocab": rows.shape[1],
                "file": name + ".f32", **more})


# --- the shipped checkpoint ---

def greedy(model, tokenizer, prompts, want, n=200):
    """Continues prompts greedily; keeps those whose every step is clear and that do not end on the way."""
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt).input_ids
        seen, cache, last, margin = [], None, ids, float("inf")
        with torch.no_grad():
            for _ in range(n):
                step = model(torch.tensor([last]), past_key_values=cache, use_cache=True)
                cache, top = step.past_key_values, step.logits[0, -1].topk(2)
                margin = min(margin, (top.values[0] - top.values[1]).item())
                last = [top.indices[0].item()]
                seen += last
        clear = margin > 5e-3 and 2 not in seen
        print(f"greedy {prompt[-40:]!r}: margin {margin:.4f}{'' if clear else ', left out'}")
        if clear:
            # The same without a cache: every token is the most probable one after those before it.
            assert logits(model, ids + seen)[len(ids) - 1:-1].argmax(-1).tolist() == seen
            out.append({"prompt": prompt, "ids": ids, "next": seen, "text": tokenizer.decode(seen), "margin": margin})
        if len(out) == want:
            return out
    sys.exit("too few prompts with clear continuations")


@torch.no_grad()
def recall(model, tokenizer):
    documents = json.load(open(os.path.join(HERE, "recall.json"), encoding="utf-8"))
    right = count = 0
    for document in documents:
        ids = tokenizer(document["text"]).input_ids
        assert len(ids) == document["tokens"]
        for c in document["cases"]:
            whole = tokenizer(document["text"] + c["question"] + c["answer"]).input_ids
            n = len(tokenizer(c["answer"], add_special_tokens=False).input_ids)
            assert len(whole) <= 2048 and c["distance"] >= 1500
            right += logits(model, whole)[-n - 1:-1].argmax(-1).tolist() == whole[-n:]
            count += 1
    print(f"recall: {right} of {count}")


def shipped(golden):
    model = OPTForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    encode = lambda s: tokenizer(s).input_ids
    assert encode("a")[0] == 2
    recall(model, tokenizer)

    question = "Question: Where is the key of Mira?\nAnswer:"
    case(golden["logits"], "single", "../tiny", model, [encode("One evening Mira could not find her whistle. She")])
    case(golden["logits"], "ragged", "../tiny", model, [
        encode("Once upon a time"), encode("Mira lives in the old mill. Where does Mira live? Zzz..."),
        encode("Tom keeps his map under the red bed.\nQuestion: Where is the map of Tom?\nAnswer: The map")])
    text = BOOK + "".join(
        f"On a cold day {a} and {b} built a kite of paper and thin wood. It had a long tail of old ribbons. "
        f"{a} owns {n} hens.\n"
        for a, b, n in (("Anna", "Karl", "nine"), ("Hugo", "Rosa", "two"), ("Ella", "Paul", "six"),
                        ("Vera", "Otto", "ten")))
    ids = encode(text * 2 + question)
    kept = sorted(set(range(0, len(ids), 16)) | {len(ids) - 1})
    case(golden["logits"], "long", "../tiny", model, [ids], [kept], chunk=64)

    golden["greedy"] = greedy(model, tokenizer, [
        BOOK + question, "One morning", "Once upon a time", "Anna and Tom", "In the forest", "The old king", "Mira",
        "The next day", "Peter was sad, because", "\"Good morning,\" said", "A long time ago",
        "When the bells rang, Lena", "Two days later", "On a cold day Hugo", "The birds", "Vera heard a strange sound",
        "It was late when", "After that they", BOOK + "Two days later"], 3)

    pairs = []
    for s in STRINGS:
        ids = tokenizer(s, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == s, s
        pairs.append({"text": s, "ids": ids})
    write(os.path.join(ROOT, "decoder", "tokenizer", "testdata", "shipped.json"), pairs)


# --- random checkpoints ---

def random_model(seed, dtype, **config):
    """A model with drawn weights, rounded to dtype. Queries and keys are large enough that attention is peaked."""
    base = dict(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
                max_position_embeddings=64, dropout=0.0)
    model = OPTForCausalLM(OPTConfig(**base | config))
    generator = torch.Generator().manual_seed(seed)
    for name, x in sorted(model.named_parameters()):
        noise = torch.randn(x.shape, generator=generator)
        if "layer_norm" in name:
            x.data = 1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise
        elif name.endswith("bias"):
            x.data = 0.3 * noise
        elif "embed" in name:
            x.data = noise if "positions" in name else noise / model.config.word_embed_proj_dim ** 0.5
        else:
            x.data = noise * (1.5 if "q_proj" in name or "k_proj" in name else 1) / x.shape[1] ** 0.5
    model.tie_weights()
    return model.to(dtype)


def fresh(name):
    folder = os.path.join(CHECKPOINTS, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def pickled(model, folder, prefix, shards=1, legacy=False, head=False):
    """Saves pytorch_model.bin, or shards of it with an index, as the published folders have them."""
    state = {k.replace("model.", prefix, 1) if k.startswith("model.") else k: v.contiguous()
             for k, v in model.state_dict().items() if head or k != "lm_head.weight"}
    names = list(state)
    files = ["pytorch_model.bin"] if shards == 1 else [
        f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    place = {k: files[i * shards // len(names)] for i, k in enumerate(names)}
    for file in files:
        torch.save({k: state[k].clone() for k in names if place[k] == file}, os.path.join(folder, file),
                   _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        size = sum(v.numel() * v.element_size() for v in state.values())
        write(os.path.join(folder, "pytorch_model.bin.index.json"),
              {"metadata": {"total_size": size}, "weight_map": place})
    model.config.architectures, model.config.dtype = ["OPTForCausalLM"], next(model.parameters()).dtype
    model.config.save_pretrained(folder)


@torch.no_grad()
def continued(name, model, seed, want=3, n=20):
    """Greedy continuations of drawn ids, of prompts whose every step is clear."""
    generator, out = torch.Generator().manual_seed(seed), []
    for _ in range(200):
        ids = [2] + torch.randint(4, model.config.vocab_size, (1 + 3 * len(out),), generator=generator).tolist()
        seen, margin = [], float("inf")
        for _ in range(n):
            top = logits(model, ids + seen)[-1].topk(2)
            margin = min(margin, (top.values[0] - top.values[1]).item())
            seen.append(top.indices[0].item())
        if margin > 0.05 and len(set(seen)) > 5:
            print(f"{name}: {ids} goes on with {seen}, margin {margin:.4f}")
            out.append({"model": name, "ids": ids, "next": seen, "margin": margin})
        if len(out) == want:
            return out
    sys.exit("too few prompts with clear continuations")


def random_checkpoints(golden, only=None):
    def golden_case(name, model, seed):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda n: torch.randint(4, model.config.vocab_size, (n,), generator=generator).tolist()
        batch = [[2] + draw(n) for n in (23, 1, 40)]
        case(golden["logits"], name, name, model.float().eval(), batch)

    name = "galactica"  # gelu, no biases, norms without weights
    if only in (None, name):
        model = random_model(7, torch.float16, hidden_size=128, num_attention_heads=2, ffn_dim=256, num_hidden_layers=2,
                             activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False)
        model.save_pretrained(fresh(name))
        model = OPTForCausalLM.from_pretrained(os.path.join(CHECKPOINTS, name), dtype=torch.float32).eval()
        assert not any("bias" in x or "layer_norm" in x for x, _ in model.named_parameters())
        golden_case(name, model, 7)
        golden["tokens"] += continued(name, model, 7)
    if only is not None:
        return

    name = "opt350"  # post-norm, and the embedding narrower than the decoder
    model = random_model(1, torch.float16, do_layer_norm_before=False, word_embed_proj_dim=16)
    model.save_pretrained(fresh(name))
    golden_case(name, OPTForCausalLM.from_pretrained(os.path.join(CHECKPOINTS, name), dtype=torch.float32), 1)

    name = "sharded-bf16"
    model = random_model(2, torch.bfloat16, hidden_size=48, num_attention_heads=3)
    model.save_pretrained(fresh(name), max_shard_size="24KB")
    golden_case(name, OPTForCausalLM.from_pretrained(os.path.join(CHECKPOINTS, name), dtype=torch.float32), 2)

    name = "dim80"
    model = random_model(3, torch.float16, hidden_size=160, num_attention_heads=2, ffn_dim=64, num_hidden_layers=2)
    model.save_pretrained(fresh(name))
    golden_case(name, OPTForCausalLM.from_pretrained(os.path.join(CHECKPOINTS, name), dtype=torch.float32), 3)

    name = "bin-f16"  # as facebook/opt-* have it: no "model." before the names, no head
    model = random_model(4, torch.float16)
    pickled(model, fresh(name), prefix="")
    golden_case(name, model, 4)

    name = "bin-legacy"  # the form of torch before 1.6, with the whole names
    model = random_model(5, torch.float32, num_hidden_layers=1)
    pickled(model, fresh(name), prefix="model.", legacy=True)
    golden_case(name, model, 5)

    name = "bin-sharded"  # and a head of its own
    model = random_model(6, torch.bfloat16, tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.model.decoder.embed_tokens.weight)
    pickled(model, fresh(name), prefix="model.", shards=3, head=True)
    golden_case(name, model, 6)


def write(name, content):
    """JSON with one line for each inner item, so that files stay short and differences readable."""
    with open(os.path.join(HERE, name), "w", encoding="utf-8", newline="\n") as f:
        if isinstance(content, list):
            f.write("[\n" + ",\n".join(json.dumps(x, ensure_ascii=True) for x in content) + "\n]\n")
        else:
            f.write("{\n" + ",\n".join(
                json.dumps(k) + ": " + ("[\n" + ",\n".join(json.dumps(x) for x in v) + "\n]" if isinstance(v, list)
                                        else json.dumps(v)) for k, v in content.items()) + "\n}\n")


def main():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        only = sys.argv[1]
        golden = json.load(open(os.path.join(HERE, "golden.json"), encoding="utf-8"))
        for cases in ("logits", "tokens"):
            golden[cases] = [c for c in golden.get(cases, []) if c["model"] != only]
        random_checkpoints(golden, only)
        return write("golden.json", golden)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden = {"versions": versions, "logits": [], "greedy": [], "tokens": []}
    shipped(golden)
    random_checkpoints(golden)
    write("golden.json", golden)


if __name__ == "__main__":
    main()
