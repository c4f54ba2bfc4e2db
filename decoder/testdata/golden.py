"""Writes the golden files of this folder with transformers, in float32 on the CPU.

    python golden.py            # needs torch, transformers, numpy

golden.json
    models       of each: name, config (its config.json), scale of its weights, embedding (that of the embedding), and
                 prompts      token ids
                 file         raw little-endian float32: a row of logits for each token, prompt after prompt; each
                              prompt is computed alone, so no padding can reach its logits
                 next         the 200 ids of the greedy continuation of the first prompt
                 margin       the least distance between the two largest logits on the way
    frequencies  rotary embeddings: config, and what transformers computes for it

Weights are not stored: element i of a parameter is

    z = splitmix64(fnv1a64(name) + i),   v = (z >> 40) / 2^23 - 1

times the model's scale for matrices, the embedding's for that and for positions, 1/2 for biases, and 1 + v/2 for norms (v/2
for Gemma's, which are of 1 + weight), rounded to float32. So no parameter can be left out unnoticed.
"""

import copy
import json
import os
import sys

import numpy as np
import torch
import transformers as t
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV, DIM = 64, 64, 96, 2, 2, 1, 64
# Of scales of weights the first one is taken with a text that goes on and is clear at each step.
SCALES = [0.125, 0.3125, 0.28125, 0.34375, 0.40625, 0.25, 0.1875, 0.15625, 0.21875, 0.375, 0.4375, 0.46875]

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
            v = v / 2 if model.config.model_type.startswith("gemma") else 1 + v / 2
        elif name.endswith(".bias"):
            v = v / 2
        else:
            v = v * (embedding if "embed_" in name else scale)
        p.data = torch.from_numpy(v.astype(np.float32))
    return model.eval()


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(model, prompt, n=200):
    seen, cache, last, margin = [], None, prompt, float("inf")
    for _ in range(n):
        step = model(torch.tensor([last]), past_key_values=cache, use_cache=True)
        cache, top = step.past_key_values, step.logits[0, -1].topk(2)
        margin = min(margin, (top.values[0] - top.values[1]).item())
        last = [top.indices[0].item()]
        seen += last
    assert logits(model, prompt + seen)[len(prompt) - 1:-1].argmax(-1).tolist() == seen
    return seen, margin


def opt(name, **fields):
    return model(name, t.OPTForCausalLM, t.OPTConfig, None, embedding=fields.pop("embedding", 0.125 if fields.get("tie_word_embeddings", True) else 1), ffn_dim=INNER, word_embed_proj_dim=fields.pop("word_embed_proj_dim", HIDDEN),
                 num_attention_heads=1, max_position_embeddings=256, **fields)


def model(name, kind, config, rope, scales=SCALES, clear=5e-4, matter=(), embedding=None, **fields):
    """A model. fields are those of config.json that others don't have; matter is values of some of them that have to make
    other logits. The embedding has the scale of the other matrices if it is tied, and else 1, unless embedding says another."""
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=4096,
                  attn_implementation="eager", architectures=[kind.__name__], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if kind is not t.OPTForCausalLM:
        common.update(intermediate_size=INNER, num_key_value_heads=KV, head_dim=DIM, rms_norm_eps=1e-5)
    if rope is not None:
        common["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **rope}

    def of_embedding(scale):
        return embedding or (scale if fields.get("tie_word_embeddings") else 1)

    def new(scale, **other):
        c = config(**copy.deepcopy({**common, **fields, **other}))
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


def latent(name, kind, config, rope, matter, **fields):
    """A model with latent attention, and without experts."""
    if "Deepseek" in kind.__name__:
        fields["first_k_dense_replace"] = LAYERS
    return model(name, kind, config, rope, SCALES, 5e-4, matter, num_attention_heads=4, num_key_value_heads=4, head_dim=8, kv_lora_rank=24,
                 **{"q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, **fields})


def write(name, rows):
    with open(os.path.join(HERE, name + ".f32"), "wb") as f:
        f.write(rows.detach().numpy().astype("<f4").tobytes())


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
MSCALES = {"original_max_position_embeddings": 32, "mscale": 0.8, "mscale_all_dim": 0.6}


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
        out.append({"dim": dim, "context": 0, "rope": rope, "w": [float(w) for w in e.inv_freq], "m": float(e.attention_scaling)})
    for kind, more in [("dynamic", {"factor": 4.0}), ("longrope", {"long_factor": [1 + i / 8 for i in range(32)], "short_factor": [1 + i / 99 for i in range(32)], "original_max_position_embeddings": 4096})]:
        rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
        for context in [1000, 20000]:
            c = t.LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=8192, rope_parameters=dict(rope))
            w, m = t.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](c, "cpu", seq_len=context)
            out.append({"dim": 64, "context": context, "max": 8192, "rope": rope, "w": [float(x) for x in w], "m": float(m)})
    return out


def main():
    golden = {
        "versions": {"torch": torch.__version__, "transformers": t.__version__},
        "models": [
            model("llama3", t.LlamaForCausalLM, t.LlamaConfig, {**LLAMA3, "original_max_position_embeddings": 32}),
            model("yarn", t.LlamaForCausalLM, t.LlamaConfig, {**YARN, "original_max_position_embeddings": 32}),
            model("qwen2", t.Qwen2ForCausalLM, t.Qwen2Config, {"rope_theta": 1000000.0}, tie_word_embeddings=True),
            model("qwen3", t.Qwen3ForCausalLM, t.Qwen3Config, {"rope_theta": 1000000.0}),
            model("llama_bias", t.LlamaForCausalLM, t.LlamaConfig, {"rope_type": "linear", "factor": 3.0}, attention_bias=True, mlp_bias=True,
                  matter=[{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}]),
            model("qwen2_window", t.Qwen2ForCausalLM, t.Qwen2Config, {}, SCALES, 5e-4, [{"sliding_window": 8}, {"max_window_layers": 2}],
                  num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1),
            model("qwen3_bias", t.Qwen3ForCausalLM, t.Qwen3Config, {}, attention_bias=True, tie_word_embeddings=True),
            model("gemma", t.GemmaForCausalLM, t.GemmaConfig, {}, SCALES, 5e-4, embedding=0.125, num_hidden_layers=2),
            model("gemma3", t.Gemma3ForCausalLM, t.Gemma3TextConfig, None, SCALES, 5e-4, [{"sliding_window": 8}, {"query_pre_attn_scalar": DIM}],
                  embedding=0.125, num_hidden_layers=3, sliding_window=7, query_pre_attn_scalar=16,
                  layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                  rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                   "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0}}),
            model("phi3", t.Phi3ForCausalLM, t.Phi3Config, {"partial_rotary_factor": 0.5}, SCALES, 5e-4,
                  [{"sliding_window": 9}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}],
                  hidden_size=HEADS * DIM, sliding_window=10),
            model("phi3_long", t.Phi3ForCausalLM, t.Phi3Config,
                  {"rope_type": "longrope", "partial_rotary_factor": 0.5, "attention_factor": 1.25, "original_max_position_embeddings": 1,
                   "long_factor": [1 + i / 8 for i in range(DIM // 4)], "short_factor": [1.0] * (DIM // 4)}, hidden_size=HEADS * DIM, sliding_window=None),
            model("olmo2", t.Olmo2ForCausalLM, t.Olmo2Config, {}),
            model("granite", t.GraniteForCausalLM, t.GraniteConfig, {}, SCALES, 5e-4,
                  [{"embedding_multiplier": 1.0}, {"residual_multiplier": 1.0}, {"attention_multiplier": 0.125}, {"logits_scaling": 1.0}],
                  embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.25, logits_scaling=4.0),
            opt("opt"),
            opt("opt_post", tie_word_embeddings=False, do_layer_norm_before=False, word_embed_proj_dim=32),
            opt("opt_plain", enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu", tie_word_embeddings=False),
            opt("opt_last", _remove_final_layer_norm=True),
            model("mistral", t.MistralForCausalLM, t.MistralConfig, {}, SCALES, 5e-4, [{"sliding_window": None}, {"sliding_window": 11}],
                  num_attention_heads=4, num_key_value_heads=2, sliding_window=10),
            model("gemma2", t.Gemma2ForCausalLM, t.Gemma2Config, {}, SCALES, 5e-4,
                  [{"sliding_window": 8}, {"layer_types": ["sliding_attention"] * 3}, {"layer_types": ["full_attention"] * 3},
                   {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"query_pre_attn_scalar": DIM}],
                  embedding=0.125, num_hidden_layers=3, sliding_window=7, query_pre_attn_scalar=16,
                  attn_logit_softcapping=50.0, final_logit_softcapping=5.0),
            latent("deepseek_v3", t.DeepseekV3ForCausalLM, t.DeepseekV3Config, {}, [{"rope_interleave": False}]),
            latent("deepseek_v3_yarn", t.DeepseekV3ForCausalLM, t.DeepseekV3Config, {**YARN, **MSCALES},
                   [{"rope_interleave": True}, {"rope_parameters": {**YARN, **MSCALES, "rope_theta": 10000.0, "mscale": 0.6}}], rope_interleave=False, attention_bias=True),
            latent("deepseek_v2_lite", t.DeepseekV2ForCausalLM, t.DeepseekV2Config, {**YARN, **MSCALES, "mscale": 0.707, "mscale_all_dim": 0.707},
                   [{"rope_parameters": {**YARN, **MSCALES, "rope_theta": 10000.0, "mscale": 0, "mscale_all_dim": 0, "attention_factor": 1.0}}],
                   q_lora_rank=None, attention_bias=True, mlp_bias=True),
            latent("youtu", t.YoutuForCausalLM, t.YoutuConfig, {}, [{"rope_interleave": False}], rope_interleave=True, tie_word_embeddings=True),
            latent("minicpm3", t.MiniCPM3ForCausalLM, t.MiniCPM3Config,
                   {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.25, "original_max_position_embeddings": 1,
                    "long_factor": [1 + i / 8 for i in range(4)], "short_factor": [1.0] * 4},
                   [{"scale_emb": 1.0}, {"scale_depth": 1.0}, {"dim_model_base": 64}],
                   scale_emb=3.0, scale_depth=0.75, dim_model_base=16, v_head_dim=None, tie_word_embeddings=True),
        ],
        "frequencies": frequencies(),
    }
    with open(os.path.join(HERE, "golden.json"), "w", encoding="utf-8") as f:
        json.dump(golden, f)
        f.write("\n")


if __name__ == "__main__":
    main()
