"""Trains a small DeepSeek V3 without experts on English text, for `leanbench tpla`.

    python mla.py -o DIR FILE...    # minutes on a GPU; needs torch, transformers, tokenizers

A FILE is plain text, HTML, or either of both in gzip's or dictzip's format. The last -held bytes of the first FILE are
not trained on, and become DIR/held-out.txt. The vocabulary is made from the rest.

DIR gets a model's folder, and of -calibration tokens of the training text and of each layer, as float32

latents.f32   the latent vectors before their norm, with rotated last elements: (layers, tokens, latent + rope)
queries.f32   the queries, rotated: (layers, tokens, heads * (nope + rope))
"""

import argparse
import gzip
import html
import json
import math
import os
import re
import time

import numpy as np
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

CONTEXT, VOCAB = 1024, 4096


def read(name):
    """Returns a file's text, without HTML's tags."""
    data = open(name, "rb").read()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if name.endswith(".html"):
        text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", text)
        text = html.unescape(re.sub(r"(?s)<[^>]*>", "", re.sub(r"(?i)</?(p|br|div|h\d|li)\b[^>]*>", "\n", text)))
        text = re.sub(r"\s*\n\s*\n\s*", "\n\n", text)
    return text


def model(device):
    c = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=320, intermediate_size=1024, num_hidden_layers=8, first_k_dense_replace=8,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=192, kv_lora_rank=128,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None, eos_token_id=None, pad_token_id=None, attention_dropout=0.0)
    return deepseek.DeepseekV3ForCausalLM(c).to(device)


def train(m, tokens, seconds, batch, rate, device):
    """Trains until the seconds are over, with a rate that falls with the time."""
    matrices = [p for p in m.parameters() if p.dim() > 1]
    vectors = [p for p in m.parameters() if p.dim() < 2]
    solver = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                               lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    start, step, loss = time.time(), 0, None
    while True:
        share = (time.time() - start) / seconds
        if share >= 1:
            break
        for group in solver.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        begin = torch.randint(len(tokens) - CONTEXT - 1, (batch, 1), device=device)
        x = tokens[begin + torch.arange(CONTEXT + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16):
            logits = m(input_ids=x[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        solver.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        solver.step()
        if step % 100 == 0:
            print(f"step {step}, {time.time() - start:.0f} s, loss {loss.item():.3f}", flush=True)
        step += 1
    return {"steps": step, "loss": loss.item(), "tokens": step * batch * CONTEXT, "weights": sum(p.numel() for p in m.parameters())}


@torch.no_grad()
def calibrate(m, tokens):
    """Returns latent vectors and queries of all layers, as attention has them."""
    latents, queries, c = [], [], m.config

    def before(layer, args, kwargs):
        x, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        q = q.view(1, x.shape[1], c.num_attention_heads, -1).transpose(1, 2)
        plain, q = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k = layer.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        q, k = deepseek.apply_rotary_pos_emb_interleave(q, k[:, None], cos, sin)
        latents.append(torch.cat([latent, k[:, 0]], -1)[0].cpu().numpy())
        queries.append(torch.cat([plain, q], -1).transpose(1, 2).flatten(2)[0].cpu().numpy())

    hooks = [layer.self_attn.register_forward_pre_hook(before, with_kwargs=True) for layer in m.model.layers]
    m(input_ids=tokens[None].long(), use_cache=False)
    for h in hooks:
        h.remove()
    return np.stack(latents), np.stack(queries)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("-o", required=True)
    p.add_argument("-seconds", type=float, default=150)
    p.add_argument("-batch", type=int, default=64)
    p.add_argument("-rate", type=float, default=2e-3)
    p.add_argument("-held", type=int, default=400000)
    p.add_argument("-calibration", type=int, default=512)
    p.add_argument("files", nargs="+")
    o = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    os.makedirs(o.o, exist_ok=True)
    texts = [read(f) for f in o.files]
    first = texts[0].encode()
    held, texts[0] = first[-o.held:].decode("utf-8", errors="ignore"), first[:-o.held].decode("utf-8", errors="ignore")
    with open(os.path.join(o.o, "held-out.txt"), "w") as f:
        f.write(held)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator((t[i:i + 100000] for t in texts for i in range(0, min(len(t), 10**7), 100000)), vocab_size=VOCAB, show_progress=False)
    bpe.save(os.path.join(o.o, "tokenizer.json"))
    with open(os.path.join(o.o, "tokenizer_config.json"), "w") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}, f)
    pieces = [e.ids for t in texts for e in bpe._tokenizer.encode_batch([t[i:i + 100000] for i in range(0, len(t), 100000)])]
    tokens = torch.tensor(np.concatenate([np.asarray(x, np.int16) for x in pieces]), device=device)
    print(f"{len(tokens)} tokens of {sum(map(len, texts))} characters", flush=True)
    m = model(device)
    print(json.dumps(train(m, tokens, o.seconds, o.batch, o.rate, device)), flush=True)
    m.eval()
    m.float().save_pretrained(o.o)
    for name, x in zip(("latents", "queries"), calibrate(m, tokens[:o.calibration])):
        x.astype("<f4").tofile(os.path.join(o.o, name + ".f32"))
    ids = torch.tensor(bpe.encode(held).ids[:16 * CONTEXT], device=device).view(-1, CONTEXT)
    with torch.no_grad():
        logits = m(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    print(f"held-out text, {len(ids)} windows: perplexity {loss.exp().item():.4f}")


if __name__ == "__main__":
    main()
