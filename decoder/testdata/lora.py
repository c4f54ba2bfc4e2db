"""Writes lora.json and the logits of LoRA adapters that peft made for models of golden.json.

    python lora.py            # needs torch, transformers, numpy, peft

lora.json has a list of cases:
    model    the model's name in golden.json
    config   adapter_config.json, as peft wrote it
    tensors  [name, shape, dtype] of adapter_model.safetensors, as peft wrote it
    file     raw little-endian float32: a row of logits for each token, prompt after prompt

Element i of a tensor is the v of golden.py for the tensor's name, divided by 4, and rounded to the dtype. The folder lora
has one adapter as peft wrote it: that of the case with "folder". The folder lora/torch has the same adapter as torch.save
writes it.
"""

import json
import os
import shutil
import tempfile

import numpy as np
import peft
import safetensors.torch
import torch
import transformers as t

import golden

QKV, OUT, MLP = ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj", "down_proj"]


def case(name, base, dtype=torch.float32, folder=False, **fields):
    model = next(m for m in json.load(open(os.path.join(golden.HERE, "golden.json"), encoding="utf-8"))["models"] if m["name"] == base)
    config = t.AutoConfig.for_model(**model["config"])
    config._attn_implementation = "eager"
    torch.manual_seed(0)

    def filled():
        m = golden.fill(getattr(t, model["config"]["architectures"][0])(config), model["scale"], model["embedding"])
        return peft.get_peft_model(m, peft.LoraConfig(task_type="CAUSAL_LM", **fields))

    def of(m, wide):
        for n, p in m.named_parameters():
            if "lora_" in n:
                v = golden.values(n.replace(".default.", "."), p.shape) / 4
                p.data = torch.from_numpy(v.astype(np.float32)).to(dtype).float()
        m = m.eval()
        return torch.cat([golden.logits(m.double() if wide else m, p) for p in golden.PROMPTS])

    plain = torch.cat([golden.logits(filled().eval().get_base_model(), p) for p in golden.PROMPTS])
    m = filled()
    rows = of(m, False)
    off = (of(filled(), True) - rows).abs().max().item()
    changed = (plain - rows).abs().max().item()
    print(f"{name}: off float64 by {off:.1e}, changed by {changed:.2f}, largest {rows.abs().max():.2f}")
    assert off < 3e-5 and changed > 0.1
    with tempfile.TemporaryDirectory() as dir:
        if dtype != torch.float32:
            m = m.to(dtype)
        m.save_pretrained(dir, save_embedding_layers=False)
        file = os.path.join(dir, "adapter_model.safetensors")
        tensors = safetensors.torch.load_file(file)
        for n, x in tensors.items():
            v = torch.from_numpy((golden.values(n, x.shape) / 4).astype(np.float32)).to(dtype)
            assert x.dtype == dtype and torch.equal(x, v), n
        with open(os.path.join(dir, "adapter_config.json"), encoding="utf-8") as f:
            written = json.load(f)
        if folder:
            to = os.path.join(golden.HERE, "lora")
            os.makedirs(to, exist_ok=True)
            for n in ["adapter_config.json", "adapter_model.safetensors"]:
                shutil.copyfile(os.path.join(dir, n), os.path.join(to, n))
            os.makedirs(os.path.join(to, "torch"), exist_ok=True)
            shutil.copyfile(os.path.join(dir, "adapter_config.json"), os.path.join(to, "torch", "adapter_config.json"))
            torch.save(tensors, os.path.join(to, "torch", "adapter_model.bin"))
    golden.write("lora_" + name, rows)
    out = {"name": name, "model": base, "config": written, "file": f"lora_{name}.f32",
           "tensors": [[n, list(x.shape), str(x.dtype).removeprefix("torch.")] for n, x in sorted(tensors.items())]}
    return {**out, "folder": True} if folder else out


def main():
    cases = [
        case("llama", "llama3", r=4, lora_alpha=8, target_modules=QKV + OUT + MLP + ["lm_head"],
             rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 7, r".*\.1\.mlp\..*_proj": 3}, alpha_pattern={"k_proj": 5, "^model.layers.0.mlp.down_proj": 1.5}),
        case("phi3", "phi3", r=3, lora_alpha=4, use_rslora=True, target_modules="all-linear", lora_dropout=0.1),
        case("gemma2", "gemma2", torch.bfloat16, r=4, lora_alpha=6, target_modules=r".*\.layers\.[02]\.(self_attn\.[qv]_proj|mlp\.\w+_proj)"),
        case("opt", "opt", torch.float16, r=5, lora_alpha=10, fan_in_fan_out=True, target_modules=["q_proj", "v_proj", "out_proj", "fc1", "fc2"],
             exclude_modules=["layers.0.fc1"]),
        case("opt_post", "opt_post", r=2, lora_alpha=3, use_rslora=True, rank_pattern={"project_in": 5}, target_modules=["project_in", "project_out", "k_proj"]),
        case("granite", "granite", r=2, lora_alpha=16, folder=True, target_modules=["v_proj", "up_proj"], layers_to_transform=[1], init_lora_weights="gaussian"),
    ]
    with open(os.path.join(golden.HERE, "lora.json"), "w", encoding="utf-8") as f:
        json.dump({"versions": {"peft": peft.__version__, "transformers": t.__version__}, "cases": cases}, f)
        f.write("\n")


if __name__ == "__main__":
    main()
