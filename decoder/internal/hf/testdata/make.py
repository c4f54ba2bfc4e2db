"""Makes the files of this folder with torch.save and transformers.

config.json   a decoder in OPT-350m's layout, small
*.bin         its weights in the layouts and types that torch writes
weights.json  names and shapes of the weights of decoders in transformers

Element i of the n-th weight by name is ((31n + 7i) mod 255 - 127) / 8, which
float32, float16 and bfloat16 all hold exactly.

    pip install torch==2.11.0 transformers==5.17.0
    python make.py
"""

import json
from collections import OrderedDict

import torch
from transformers import OPTConfig, OPTForCausalLM

small = dict(vocab_size=11, hidden_size=8, word_embed_proj_dim=4, ffn_dim=12, num_hidden_layers=1,
             num_attention_heads=2, max_position_embeddings=6, do_layer_norm_before=False)


def weights(**config):
    """Names and shapes, without the head where it is tied."""
    config = OPTConfig(**config)
    model = OPTForCausalLM(config)
    if config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    return {name: list(p.shape) for name, p in model.named_parameters()}


def values(dtype, prefix="model."):
    state = OrderedDict()
    for n, (name, shape) in enumerate(sorted(weights(**small).items())):
        i = torch.arange(torch.Size(shape).numel())
        state[name.replace("model.", prefix, 1)] = (((31 * n + 7 * i) % 255 - 127) / 8).reshape(shape).to(dtype)
    state._metadata = OrderedDict({"": {"version": 1}, "decoder": {"version": 1}})
    return state


with open("config.json", "w") as f:
    json.dump({"model_type": "opt", **small}, f, indent=1)
    f.write("\n")

torch.save(values(torch.float32), "f32.bin")
torch.save(values(torch.float16, ""), "f16.bin")
torch.save(values(torch.bfloat16, ""), "bf16.bin")
torch.save(dict(values(torch.float32)), "protocol4.bin", pickle_protocol=4)
torch.save(values(torch.float16, ""), "f16-old.bin", _use_new_zipfile_serialization=False)
torch.save(values(torch.bfloat16), "bf16-old.bin", _use_new_zipfile_serialization=False)

# Two shards, and names without "decoder.".
state = values(torch.bfloat16, "")
names = [name.removeprefix("decoder.") for name in state]
index = {}
for k, part in enumerate([names[:9], names[9:]], 1):
    shard = f"pytorch_model-{k:05}-of-00002.bin"
    torch.save({name: state["decoder." + name] for name in part}, shard)
    index |= {name: shard for name in part}
with open("pytorch_model.bin.index.json", "w") as f:
    json.dump({"metadata": {"total_size": 1}, "weight_map": index}, f, indent=1)
    f.write("\n")

# Views: everything that torch can do to a tensor's place in its storage.
base = torch.arange(24, dtype=torch.float32)
views = {
    "transposed": base.reshape(4, 6).T,
    "part": base.reshape(4, 6)[1:3, 2:5],
    "last": base[20:],
    "scalar": base[7],
    "steps": base[1::5],
    "parameter": torch.nn.Parameter(base[:6].reshape(2, 3)),
    "half": base.half().reshape(2, 3, 4).permute(2, 0, 1),
    "bfloat": base.bfloat16().reshape(2, 12).T,
    "one": base.reshape(4, 6)[:, 3:4],
    "empty": base[:0].reshape(0, 3),
    "long": torch.arange(3),
    "bool": torch.tensor([True, False]),
    "double": base.double(),
}
torch.save(views, "views.bin")
torch.save(views, "views-old.bin", _use_new_zipfile_serialization=False)
torch.save({"repeated": torch.ones(1).expand(1 << 30, 4)}, "repeated.bin")
torch.save({"decoder": {"nested": torch.ones(2)}}, "nested.bin")
torch.save([torch.ones(2)], "list.bin")
torch.save(torch.nn.Linear(2, 2), "module.bin")
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.bin")

pre = dict(small, word_embed_proj_dim=8, num_hidden_layers=2, do_layer_norm_before=True)
with open("weights.json", "w") as f:
    rows = []
    for config in [small, pre, dict(pre, _remove_final_layer_norm=True), dict(pre, enable_bias=False),
                   dict(pre, layer_norm_elementwise_affine=False), dict(pre, tie_word_embeddings=False),
                   dict(small, tie_word_embeddings=False)]:
        rows.append(json.dumps({"config": config, "weights": weights(**config)}))
    f.write("[\n" + ",\n".join(rows) + "\n]\n")
