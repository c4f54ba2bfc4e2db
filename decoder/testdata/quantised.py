"""Writes the folders of testdata/quantised: small Llama models whose matrices AutoGPTQ and AutoAWQ have packed, or are in FP8.

    pip install torch numpy safetensors
    pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9    and unpack both
    python quantised.py AUTO_GPTQ AUTOAWQ

The packages' own functions pack the matrices, and torch converts FP8. golden.json has a SHA-256 of each matrix: of scale * (integer - zero)
or scale * number as float32, in row-major order of (out, in), from the numbers before packing.
"""

import hashlib
import importlib.util
import json
import pathlib
import sys
import types

import numpy as np
import torch
from safetensors.torch import save_file

root = pathlib.Path(__file__).parent / "quantised"


def load(path, name):
    """Loads one file of a package without the package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for name in ["transformers", "transformers.pytorch_utils", "awq", "awq.utils", "awq.utils.module", "awq.utils.utils", "awq.utils.packing_utils"]:
    sys.modules[name] = types.ModuleType(name)
sys.modules["transformers"].pytorch_utils = sys.modules["transformers.pytorch_utils"]
sys.modules["transformers.pytorch_utils"].Conv1D = type("Conv1D", (), {})
sys.modules["awq.utils.module"].try_import = lambda name: (None, "")
sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
sys.modules["awq.utils.packing_utils"].dequantize_gemm = None
gptq = load(pathlib.Path(sys.argv[1]) / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "gptq").QuantLinear
awq = load(pathlib.Path(sys.argv[2]) / "awq/modules/linear/gemm.py", "gemm").WQLinear_GEMM


def numbers(rng, bits, group, out, inner, zeros, act):
    """Integers, zeros, scales and the group of each column."""
    groups = -(-inner // group)
    q = rng.integers(0, 1 << bits, (inner, out))
    z = rng.integers(zeros[0], zeros[1] + 1, (groups, out))
    s = (rng.standard_normal((groups, out)) * 0.02).astype(np.float16)
    odd = rng.random((groups, out))
    s[odd < 0.05] *= np.float16(100)
    s[odd > 0.97] = np.float16(6e-8)  # the least subnormal number
    s[s == 0] = np.float16(0.01)
    g = np.arange(inner) // group
    if act:
        g = rng.permutation(g)
    return q, z, s, g


def module(rng, how, out, inner, name, tensors, golden):
    group = inner if how["group_size"] == -1 else how["group_size"]
    bits, act = how["bits"], how.get("desc_act", False)
    v2 = how.get("checkpoint_format") == "gptq_v2"
    first = 0 if v2 or how["quant_method"] == "awq" else 1
    zeros = (1 << bits - 1,) * 2 if how.get("sym") else (first, (1 << bits) - 1)
    q, z, s, g = numbers(rng, bits, group, out, inner, zeros, act)
    w = s.astype(np.float32)[g] * (q - z[g]).astype(np.float32) + np.float32(0)  # exact, and no -0
    layer = torch.nn.Linear(inner, out, bias=False)
    layer.weight.data = torch.from_numpy(w.T.copy())
    scales, zero = torch.from_numpy(s.astype(np.float32)), torch.from_numpy(z)
    if how["quant_method"] == "awq":
        packed = awq.from_linear(layer, bits, group, scales=scales, zeros=zero.float())
    else:
        def pack(zero):
            packed = gptq(bits, group, inner, out, False, weight_dtype=torch.float32)
            packed.pack(layer, scales.T.contiguous(), zero.T.clone(), torch.from_numpy(g.astype(np.int32)))
            return packed

        packed = pack(zero)
        if v2:  # AutoGPTQ stores zeros less one
            packed.qzeros = pack(zero + 1).qzeros
    for part in ["qweight", "qzeros", "scales", "g_idx"]:
        if hasattr(packed, part):
            x = getattr(packed, part)
            tensors[f"{name}.{part}"] = (x.half() if part == "scales" else x.to(torch.int32)).contiguous()
    golden[name.removeprefix("model.") + ".weight"] = hashlib.sha256(w.T.astype("<f4").tobytes()).hexdigest()


def eight(rng, how, out, inner, name, tensors, golden):
    """A matrix in E4M3, with every number of that type."""
    bits = rng.integers(0, 256, (out, inner), dtype=np.uint8)
    bits[bits & 0x7F == 0x7F] = 0x7E  # no NaN
    w = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    scale = lambda *shape: torch.from_numpy(np.asarray(rng.standard_normal(shape) * 0.0005, dtype=np.float32))
    tensors[name + ".weight"] = w
    if how.get("weight_block_size"):
        s = scale(-(-out // 128), -(-inner // 128))
        tensors[name + ".weight_scale_inv"] = s
        s = s.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :inner]
    elif how["quant_method"] == "fp8":
        s = scale()
        tensors[name + ".weight_scale"], tensors[name + ".input_scale"] = s, torch.tensor(0.5)
    else:
        s = scale(out, 1).bfloat16()
        tensors[name + ".weight_scale"] = s
    w = (w.float() * s.float() + 0.0).numpy()
    golden[name.removeprefix("model.") + ".weight"] = hashlib.sha256(w.astype("<f4").tobytes()).hexdigest()


cases = {
    "gptq_sym": ({"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01, "static_groups": False,
                  "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq"}, 64, 96),
    "gptq_order": ({"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "quant_method": "gptq", "checkpoint_format": "gptq"}, 64, 96),
    "gptq_v2": ({"bits": 4, "group_size": 64, "desc_act": False, "sym": False, "lm_head": True, "quant_method": "gptq",
                 "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:1.7.3"]}}, 64, 96),
    "gptq_row": ({"bits": 4, "group_size": -1, "desc_act": True, "sym": False, "quant_method": "gptq"}, 128, 64),
    "gptq_8": ({"bits": 8, "group_size": 32, "desc_act": True, "sym": True, "quant_method": "gptq", "is_marlin_format": False}, 64, 32),
    "awq": ({"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None, "quant_method": "awq"}, 64, 96),
    "awq_128": ({"bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM", "quant_method": "awq"}, 128, 128),
    "fp8_block": ({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}, 136, 32),
    "fp8_tensor": ({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}, 64, 32),
    "fp8_channel": ({
        "config_groups": {"group_0": {
            "input_activations": {"actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8, "observer": None,
                                  "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float"},
            "output_activations": None, "targets": ["Linear"],
            "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": "minmax",
                        "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float"}}},
        "format": "float-quantized", "global_compression_ratio": 1.4, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed"}, 64, 32),
}

all_golden = {}
for number, (case, (how, width, inner)) in enumerate(cases.items()):
    rng = np.random.default_rng(number)
    heads, kv, vocab = 2, 1, 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "quantization_config": how,
    }
    tensors, golden = {}, {}
    half = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float16))
    tensors["model.embed_tokens.weight"] = half(vocab, width)
    if how.get("lm_head"):
        module(rng, how, vocab, width, "lm_head", tensors, golden)
    else:
        tensors["lm_head.weight"] = half(vocab, width)
    prefix = "model.layers.0."
    each = width // heads
    for name, out, inside in [("self_attn.q_proj", width, width), ("self_attn.k_proj", each * kv, width), ("self_attn.v_proj", each * kv, width),
                              ("self_attn.o_proj", width, width), ("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width), ("mlp.down_proj", width, inner)]:
        (module if "bits" in how else eight)(rng, how, out, inside, prefix + name, tensors, golden)
        if case == "gptq_sym":
            tensors[prefix + name + ".bias"] = torch.zeros(out, dtype=torch.float16)
    for name in [prefix + "input_layernorm", prefix + "post_attention_layernorm", "model.norm"]:
        tensors[name + ".weight"] = torch.ones(width, dtype=torch.float16)
    (root / case).mkdir(parents=True, exist_ok=True)
    (root / case / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, root / case / "model.safetensors")
    all_golden[case] = golden
(root / "golden.json").write_text(json.dumps(all_golden, indent=1) + "\n")
