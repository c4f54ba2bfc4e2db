"""Writes the golden files of layers of attention with sinks, with transformers, in float32 on the CPU.

    python sinks.py            # needs torch, transformers, numpy

sinks.json
    layers, one with a window and one without: what GptOssAttention makes of a prompt, and of tokens one by one after the prompt.
    hidden_size, num_attention_heads, num_key_value_heads, head_dim, rope_parameters, sliding_window (null: none)
    prompt, steps    tokens
    scale            of the weights
    file             raw little-endian float32: a row of hidden_size for each token

Weights are not stored: element i of a parameter is that of golden.py, times the scale for matrices, 1/2 for biases and 4 for sinks.
The input is that of the name "hidden_states", with the factor 1.
"""

import json
import os
import sys

import numpy as np
import torch
import transformers as t
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

HERE = os.path.dirname(os.path.abspath(__file__))
HIDDEN, DIM = 64, 64


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
    return ((z >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape)


@torch.no_grad()
def layer(name, window, prompt=24, steps=8, scale=0.5):
    index = 0 if window else 1
    c = t.GptOssConfig(hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2, head_dim=DIM,
                       sliding_window=window or 4, layer_types=["sliding_attention", "full_attention"],
                       num_local_experts=1, num_experts_per_tok=1, attn_implementation="eager")
    hidden = torch.from_numpy(values("hidden_states", (1, prompt + steps, HIDDEN)).astype(np.float32))

    def run(pieces, sinks=True, dtype=torch.float32):
        attention, rotary = GptOssAttention(c, index), GptOssRotaryEmbedding(c)
        for n, p in attention.named_parameters():
            by = 4 if n == "sinks" else 0.5 if n.endswith(".bias") else scale
            p.data = torch.from_numpy((values(n, p.shape) * by).astype(np.float32)).to(dtype)
        if not sinks:
            attention.sinks.data.fill_(-1e9)
        cache, out, at = DynamicCache(config=c), [], 0
        for n in pieces:
            x = hidden[:, at:at + n].to(dtype)
            positions = torch.arange(at, at + n)[None]
            mask = (create_sliding_window_causal_mask if window else create_causal_mask)(
                config=c, inputs_embeds=x, attention_mask=None, past_key_values=cache, position_ids=positions)
            # The cache has an entry for each layer, and a mask looks at the first one of its kind.
            y, _ = attention.eval()(x, rotary(x, positions), mask, past_key_values=cache)
            out.append(y[0])
            at += n
        return torch.cat(out)

    rows = run([prompt] + [1] * steps)
    whole = run([prompt + steps], dtype=torch.float64)
    off, by = (rows - whole).abs().max().item(), (rows - run([prompt + steps], sinks=False)).abs().max().item()
    print(f"{name}: largest {rows.abs().max():.2f}, off float64 by {off:.1e}, sinks change it by {by:.3f}")
    if off > 3e-5 or by < 0.1:
        sys.exit("no layer will do")
    with open(os.path.join(HERE, name + ".f32"), "wb") as f:
        f.write(rows.detach().numpy().astype("<f4").tobytes())
    return {"name": name, "hidden_size": HIDDEN, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": DIM,
            "rope_parameters": c.rope_parameters, "sliding_window": window, "prompt": prompt, "steps": steps, "scale": scale,
            "file": name + ".f32"}


with open(os.path.join(HERE, "sinks.json"), "w", encoding="utf-8", newline="\n") as out:
    out.write("[\n" + ",\n".join(json.dumps(x) for x in [layer("sinks", None), layer("sinks_window", 6)]) + "\n]\n")
