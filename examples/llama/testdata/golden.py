"""Writes the golden files of this folder with transformers, in float32 on the CPU.

    python golden.py            # needs torch, transformers, numpy

golden.json
    models       of each: name, config (what a graph of it needs), scale of its weights, and
                 prompts      token ids
                 file         raw little-endian float32: a row of logits for each token, prompt after prompt; each
                              prompt is computed alone, so no padding can reach its logits
                 next         the 64 ids of the greedy continuation of the first prompt
                 margin       the least distance between the two largest logits on the way
    frequencies  rotary embeddings: config, and what transformers computes for it

Weights are not stored: element i of a parameter is

    z = splitmix64(fnv1a64(name) + i),   v = (z >> 40) / 2^23 - 1

times the model's scale for matrices, 1 for an embedding that is not tied, 1/2 for biases, and 1 + v/2 for norms, rounded
to float32. So no parameter can be left out unnoticed.
"""

import json
import os
import sys

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV, DIM = 64, 64, 96, 2, 2, 1, 64
SCALES = [0.125, 0.3125, 0.28125, 0.34375, 0.40625]  # the first one with a text that goes on and is clear at each step
PROMPTS = [[1, 17, 60, 3, 3, 42, 8, 29, 11, 50, 33, 2, 7, 19, 61, 5, 24, 38, 13, 47, 9, 30, 22, 55],
           [4], [12, 63, 31, 0, 44, 44, 20, 6, 58]]


def values(name, shape):
    n = int(np.prod(shape))
    seed = 0xcbf29ce484222325
    for b in name.encode():
        seed = (seed ^ b) * 0x100000001b3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(n, dtype=np.uint64)
        z += np.uint64(0x9e3779b97f4a7c15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
        z = z ^ (z >> np.uint64(31))
    v = (z >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return v.reshape(shape)


def fill(model, scale):
    for name, p in model.named_parameters():
        v = values(name, p.shape)
        if name.endswith("norm.weight"):
            v = 1 + v / 2
        elif name.endswith(".bias"):
            v = v / 2
        elif "embed_tokens" not in name or model.config.tie_word_embeddings:
            v = v * scale
        p.data = torch.from_numpy(v.astype(np.float32))
    return model.eval()


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(model, prompt, n=64):
    seen, cache, last, margin = [], None, prompt, float("inf")
    for _ in range(n):
        step = model(torch.tensor([last]), past_key_values=cache, use_cache=True)
        cache, top = step.past_key_values, step.logits[0, -1].topk(2)
        margin = min(margin, (top.values[0] - top.values[1]).item())
        last = [top.indices[0].item()]
        seen += last
    assert logits(model, prompt + seen)[len(prompt) - 1:-1].argmax(-1).tolist() == seen
    return seen, margin


def model(name, kind, config, rope, **ours):
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    c = config(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
               num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM, max_position_embeddings=4096,
               rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=ours.get("tied", False),
               attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    for scale in SCALES:
        m = fill(kind(c), scale)
        exact = torch.cat([logits(m.double(), p) for p in PROMPTS])
        m = m.float()
        rows = torch.cat([logits(m, p) for p in PROMPTS])
        off = (rows - exact).abs().max().item()
        seen, margin = greedy(m, PROMPTS[0])
        print(f"{name}, scale {scale}: root mean square {rows.square().mean().sqrt():.3f}, largest {rows.abs().max():.2f}, "
              f"off float64 by {off:.1e}, margin {margin:.4f}, {len(set(seen))} different tokens")
        if off < 3e-5 and margin > 1e-3 and len(set(seen)) > 5:
            break
    else:
        sys.exit("no scale will do")
    with open(os.path.join(HERE, name + ".f32"), "wb") as f:
        f.write(rows.numpy().astype("<f4").tobytes())
    return {"name": name, "config": {"vocab": VOCAB, "hidden": HIDDEN, "inner": INNER, "layers": LAYERS, "heads": HEADS,
                                     "kv": KV, "dim": DIM, "eps": 1e-5, "rope": rope, **ours},
            "scale": scale, "prompts": PROMPTS, "file": name + ".f32", "next": seen, "margin": margin}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def frequencies():
    out = []
    for dim, rope in [
        (64, {"rope_theta": 10000.0}),
        (128, {"rope_theta": 1000000.0}),
        (128, {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192}),
        (64, {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}),
        (96, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        (128, {**YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768}),
        (64, {**YARN, "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
        (64, {**YARN, "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0}),
        (64, {**YARN, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048, "attention_factor": 0.8}),
    ]:
        rope = {"rope_type": "default", **rope}
        c = transformers.LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, max_position_embeddings=131072, rope_parameters=dict(rope))
        e = LlamaRotaryEmbedding(c)
        out.append({"dim": dim, "rope": rope, "w": [float(w) for w in e.inv_freq], "m": float(e.attention_scaling)})
    return out


def main():
    t = transformers
    golden = {
        "versions": {"torch": torch.__version__, "transformers": t.__version__},
        "models": [
            model("llama3", t.LlamaForCausalLM, t.LlamaConfig, {**LLAMA3, "original_max_position_embeddings": 32}),
            model("yarn", t.LlamaForCausalLM, t.LlamaConfig, {**YARN, "original_max_position_embeddings": 32}),
            model("qwen2", t.Qwen2ForCausalLM, t.Qwen2Config, {"rope_theta": 1000000.0}, bias=True, tied=True),
            model("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config, {"rope_theta": 1000000.0}, qk_norm=True),
        ],
        "frequencies": frequencies(),
    }
    with open(os.path.join(HERE, "golden.json"), "w", encoding="utf-8") as f:
        json.dump(golden, f)
        f.write("\n")


main()
