"""Writes adapters for models of ../internal/gguf/testdata/families as GGUF files, by llama.cpp's own converter.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36   # has the converter: unpack, then
    python lora_gguf.py llama_cpp_python-0.3.36/vendor/llama.cpp        # needs torch, transformers, numpy, safetensors

Tensors have the values of lora.py. The modules of a model are all linear layers, with rank 2 and lora_alpha 3.
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers as t

import golden

FAMILIES = os.path.join(golden.HERE, "..", "internal", "gguf", "testdata", "families")


def convert(name, converter):
    with open(os.path.join(FAMILIES, name + ".json"), encoding="utf-8") as f:
        config = json.load(f)
    model = getattr(t, config["architectures"][0])(t.AutoConfig.for_model(**config))
    tensors = {}
    for module, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and module != "lm_head":
            for half, shape in [("A", (2, layer.in_features)), ("B", (layer.out_features, 2))]:
                n = f"base_model.model.{module}.lora_{half}.weight"
                tensors[n] = torch.from_numpy((golden.values(n, shape) / 4).astype(np.float32))
    with tempfile.TemporaryDirectory() as dir:
        with open(os.path.join(dir, "config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f)
        with open(os.path.join(dir, "adapter_config.json"), "w", encoding="utf-8") as f:
            json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": "all-linear"}, f)
        safetensors.torch.save_file(tensors, os.path.join(dir, "adapter_model.safetensors"))
        out = os.path.join(golden.HERE, "lora", name + ".gguf")
        subprocess.run([sys.executable, os.path.join(converter, "convert_lora_to_gguf.py"), "--base", dir, "--outfile", out, dir], check=True)


for name in ["llama", "mistral", "qwen3", "gemma2", "phi3", "granite"]:
    convert(name, sys.argv[1])
