"""Writes the golden files of this folder with transformers, in float32 on the CPU.

    python golden.py            # needs torch, transformers, numpy

golden.json
    models       of each: name, config (its config.json), scale of its weights, embedding (that of the embedding), and
                 prompts      token ids
                 file         raw little-endian float32: a row of logits for each token, prompt after prompt; each
                              prompt is computed alone, so no padding can reach its logits
                 next         the 64 ids of the greedy continuation of the first prompt
                 margin       the least distance between the two largest logits on the way
    frequencies  rotary embeddings: config, and what transformers computes for it
    sinks        layers of attention with sinks, one with a window and one without: what GptOssAttention makes of
                 a prompt and of tokens one by one behind it
                 hidden_size, num_attention_heads, num_key_value_heads, head_dim, rope_parameters, sliding_window (null: none)
                 prompt, steps    tokens
                 scale            of the weights
                 file             raw little-endian float32: a row of hidden_size for each token

Weights are not stored: element i of a parameter is

    z = splitmix64(fnv1a64(name) + i),   v = (z >> 40) / 2^23 - 1

times the model's scale for matrices, the embedding's for that, 1/2 for biases, and 1 + v/2 for norms (v/2 for
Gemma's, which are of 1 + weight), rounded to float32. So no parameter can be left out unnoticed. Sinks are 4 v, and what
their layers read is v, of the name "hidden_states".
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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV, DIM = 64, 64, 96, 2, 2, 1, 64
# Of scales of weights the first one is taken with a text that goes on and is clear at each step.
SCALES = [0.125, 0.3125, 0.28125, 0.34375, 0.40625]
CLEAR_SCALES = [0.25, 0.3515625]
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


def fill(model, scale, embedding):
    for name, p in model.named_parameters():
        v = values(name, p.shape)
        if name.endswith("norm.weight"):
            v = v / 2 if model.config.model_type == "gemma2" else 1 + v / 2
        elif name.endswith(".bias"):
            v = v / 2
        else:
            v = v * (embedding if "embed_tokens" in name else scale)
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


def model(name, kind, config, rope, scales=SCALES, clear=1e-3, matter=(), embedding=None, **fields):
    """A model. fields are those of config.json that others don't have; matter is values of some of them that have to make
    other logits. The embedding has the scale of the other matrices if it is tied, and else 1, unless embedding says another."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}

    def of_embedding(scale):
        return embedding or (scale if fields.get("tie_word_embeddings") else 1)

    def new(scale, **other):
        c = config(**{**dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
                             num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM, max_position_embeddings=4096,
                             rms_norm_eps=1e-5, rope_parameters=dict(rope), attn_implementation="eager",
                             architectures=[kind.__name__], bos_token_id=None, eos_token_id=None, pad_token_id=None),
                      **fields, **other})
        return fill(kind(c), scale, of_embedding(scale))

    for scale in scales:
        m = new(scale)
        exact = torch.cat([logits(m.double(), p) for p in PROMPTS])
        m = new(scale)
        rows = torch.cat([logits(m, p) for p in PROMPTS])
        off = (rows - exact).abs().max().item()
        seen, margin = greedy(m, PROMPTS[0])
        print(f"{name}, scale {scale}: root mean square {rows.square().mean().sqrt():.3f}, largest {rows.abs().max():.2f}, "
              f"off float64 by {off:.1e}, margin {margin:.4f}, {len(set(seen))} different tokens")
        changed = [(torch.cat([logits(new(scale, **o), p) for p in PROMPTS]) - rows).abs().max().item() for o in matter]
        for o, by in zip(matter, changed):
            print(f"    {o} changes logits by {by:.3f}")
        if off < 3e-5 and margin > clear and len(set(seen)) > 5 and min(changed, default=1) > 0.01:
            break
    else:
        sys.exit("no scale will do")
    write(name, rows)
    return {"name": name, "config": json.loads(m.config.to_json_string()), "scale": scale, "embedding": of_embedding(scale), "prompts": PROMPTS,
            "file": name + ".f32", "next": seen, "margin": margin}


def write(name, rows):
    with open(os.path.join(HERE, name + ".f32"), "wb") as f:
        f.write(rows.detach().numpy().astype("<f4").tobytes())


@torch.no_grad()
def sinks(name, window, prompt=24, steps=8, scale=0.5):
    layer = 0 if window else 1
    c = t.GptOssConfig(hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=2, head_dim=DIM,
                       sliding_window=window or 4, layer_types=["sliding_attention", "full_attention"],
                       num_local_experts=1, num_experts_per_tok=1, attn_implementation="eager")
    hidden = torch.from_numpy(values("hidden_states", (1, prompt + steps, HIDDEN)).astype(np.float32))

    def run(pieces, sinks=True, dtype=torch.float32):
        attention, rotary = GptOssAttention(c, layer), GptOssRotaryEmbedding(c)
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
    write(name, rows)
    return {"name": name, "hidden_size": HIDDEN, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": DIM,
            "rope_parameters": c.rope_parameters, "sliding_window": window, "prompt": prompt, "steps": steps, "scale": scale,
            "file": name + ".f32"}


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
        c = t.LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, max_position_embeddings=131072, rope_parameters=dict(rope))
        e = LlamaRotaryEmbedding(c)
        out.append({"dim": dim, "rope": rope, "w": [float(w) for w in e.inv_freq], "m": float(e.attention_scaling)})
    return out


def main():
    golden = {
        "versions": {"torch": torch.__version__, "transformers": t.__version__},
        "models": [
            model("llama3", t.LlamaForCausalLM, t.LlamaConfig, {**LLAMA3, "original_max_position_embeddings": 32}),
            model("yarn", t.LlamaForCausalLM, t.LlamaConfig, {**YARN, "original_max_position_embeddings": 32}),
            model("qwen2", t.Qwen2ForCausalLM, t.Qwen2Config, {"rope_theta": 1000000.0}, tie_word_embeddings=True),
            model("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config, {"rope_theta": 1000000.0}),
            model("mistral", t.MistralForCausalLM, t.MistralConfig, {}, CLEAR_SCALES, 0.01, [{"sliding_window": None}, {"sliding_window": 11}],
                  num_attention_heads=4, num_key_value_heads=2, sliding_window=10),
            model("gemma2", t.Gemma2ForCausalLM, t.Gemma2Config, {}, CLEAR_SCALES, 0.01,
                  [{"sliding_window": 8}, {"layer_types": ["sliding_attention"] * 3}, {"layer_types": ["full_attention"] * 3},
                   {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"query_pre_attn_scalar": DIM}],
                  embedding=0.125, num_hidden_layers=3, sliding_window=7, query_pre_attn_scalar=16,
                  attn_logit_softcapping=50.0, final_logit_softcapping=5.0),
        ],
        "frequencies": frequencies(),
        "sinks": [sinks("sinks", None), sinks("sinks_window", 6)],
    }
    with open(os.path.join(HERE, "golden.json"), "w", encoding="utf-8") as f:
        json.dump(golden, f)
        f.write("\n")


main()
