"""Writes golden.json: distributions that transformers' generate draws from.

    python3 golden.py > golden.json
    python3 golden.py 2000 500 > large.json

The arguments are the number of cases and of tokens of the vocabulary. The file was written with transformers 5.17.0 and torch 2.9.1.
A test reads large.json, too, if the environment variable SAMPLE_GOLDEN is its name.

Each case has a configuration, a text, logits, and the probability of each token that can be chosen. The order of the processors is
that of GenerationMixin._get_logits_processor.
"""

import json
import random
import sys

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

cases = int(sys.argv[1]) if len(sys.argv) > 1 else 60
vocab = int(sys.argv[2]) if len(sys.argv) > 2 else 24
rng = random.Random(61)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
)


def some(value):
    return value if rng.random() < 0.5 else None


def case():
    settings = {
        "temperature": some(round(rng.uniform(0.3, 2.5), 2)),
        "top_k": some(rng.randint(1, vocab)) or 0,  # 0: off
        "top_p": some(round(rng.uniform(0.2, 0.99), 2)),
        "min_p": some(round(rng.uniform(0.001, 0.3), 3)),
        "typical_p": some(round(rng.uniform(0.2, 0.99), 2)),
        "repetition_penalty": some(round(rng.uniform(0.6, 2.0), 2)),
        "sequence_bias": some({(rng.randrange(vocab),): round(rng.uniform(-3, 3), 2) for _ in range(3)}),
        "suppress_tokens": some(sorted(rng.sample(range(vocab), 3))),
    }
    settings = {k: v for k, v in settings.items() if v is not None}
    text = [rng.randrange(vocab) for _ in range(rng.randint(1, 20))]
    logits = [round(rng.gauss(0, 3), 4) for _ in range(vocab)]
    ids, scores = torch.tensor([text]), torch.tensor([logits], dtype=torch.float32)
    config = GenerationConfig(do_sample=True, **settings)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(text), device="cpu")
    p = torch.softmax(processors(ids, scores).double(), -1)[0]
    if "sequence_bias" in settings:
        settings["sequence_bias"] = {str(k[0]): v for k, v in settings["sequence_bias"].items()}
    kept = {str(i): float(f"{x:.6g}") for i, x in enumerate(p.tolist()) if x > 0}
    return {"settings": settings, "text": text, "logits": logits, "kept": kept}


print("[" + ",\n".join(json.dumps(case()) for _ in range(cases)) + "]")
