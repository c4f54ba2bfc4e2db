"""Writes a tiny model of each family as a GGUF file by llama.cpp's own converter, and the config.json of the model.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install transformers==5.17.0 torch==2.9.1
    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36   # has the converter: unpack, then
    /tmp/venv/bin/python families.py llama_cpp_python-0.3.36/vendor/llama.cpp families

Element i of the weight that Hugging Face names NAME is (crc32(NAME) + 40503*i) mod 2048 / 2048 - 0.5, so that a test
knows all weights.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

llama_cpp, out = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]

import gguf  # noqa: E402
from conversion import get_model_class  # noqa: E402

BASE = dict(
    vocab_size=24, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
MODELS = {
    "llama": dict(num_hidden_layers=2, tie_word_embeddings=True),
    "llama-biases": dict(head_dim=8, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "llama-linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.5)),
    "mistral": dict(sliding_window=None),
    "qwen2": dict(rope_parameters=dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=16)),
    "qwen3": dict(head_dim=8, tie_word_embeddings=True),
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=8, num_hidden_layers=2),
    "gemma3": dict(
        head_dim=8, query_pre_attn_scalar=8, sliding_window=8, num_hidden_layers=7,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0)),
    ),
    "phi3": dict(sliding_window=8, original_max_position_embeddings=64),
    "phi3-long": dict(
        hidden_size=32, sliding_window=None, original_max_position_embeddings=16,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16, partial_rotary_factor=0.5,
            long_factor=[1.5, 2.25], short_factor=[1.0, 1.125]),
    ),
    "olmo2": dict(),
    # The converter writes no key for scale_emb, scale_depth, dim_model_base and rope_theta: llama.cpp has the values of the published model.
    "minicpm3": dict(
        num_key_value_heads=4, kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=4, tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, factor=1.0, original_max_position_embeddings=64, long_factor=[1.5, 2.25], short_factor=[1.0, 1.125]),
    ),
    "granite": dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=16.0),
}
CLASSES = dict(llama="Llama", mistral="Mistral", qwen2="Qwen2", qwen3="Qwen3", gemma="Gemma", gemma2="Gemma2", gemma3="Gemma3Text", phi3="Phi3", olmo2="Olmo2", granite="Granite", minicpm3="MiniCPM3")


def weight(name, shape):
    i = np.arange(int(np.prod(shape)), dtype=np.uint64)
    x = (np.uint64(zlib.crc32(name.encode())) + np.uint64(40503) * i) % np.uint64(2048)
    return torch.from_numpy((x.astype(np.float32) / 2048 - 0.5).reshape(tuple(shape)))


def convert(name, fields, folder):
    family = name.split("-")[0]
    config = getattr(transformers, CLASSES[family] + "Config")(**{**BASE, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config)
    architecture = type(model).__name__
    config.architectures = [architecture]
    config.save_pretrained(folder)
    weights = {n: weight(n, t.shape) for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    save_file(weights, str(folder / "model.safetensors"))
    tokenizer = dict(model=dict(vocab={str(i): i for i in range(24)}), added_tokens=[])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with torch.inference_mode():
        c = get_model_class(architecture)(folder, gguf.LlamaFileType.MOSTLY_F16, out / (name + ".gguf"), model_name=name)
        c.write()
    (out / (name + ".json")).write_text(json.dumps(json.loads((folder / "config.json").read_text()), indent=1, sort_keys=True) + "\n")


def special(self):
    self.gguf_writer.add_bos_token_id(1)
    self.gguf_writer.add_eos_token_id(2)
    self.gguf_writer.add_pad_token_id(0)


out.mkdir(exist_ok=True)
for name, fields in MODELS.items():
    family = CLASSES[name.split("-")[0]]
    with tempfile.TemporaryDirectory() as folder:
        cls = get_model_class(("Gemma3" if family == "Gemma3Text" else family) + "ForCausalLM")
        cls.set_vocab = special  # the tokenizer is not part of the test
        convert(name, fields, Path(folder))
