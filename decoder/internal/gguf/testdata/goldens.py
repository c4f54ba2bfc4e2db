"""Writes a GGUF file with a tensor of each type, and the same tensor decoded to F32 under the name NAME.f32.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install gguf==0.19.0
    /tmp/venv/bin/python goldens.py types.gguf          # the committed file
    /tmp/venv/bin/python goldens.py /tmp/many.gguf 4000 # rows of each type; LEANATTENTION_GGUF=/tmp/many.gguf go test -run Files

Rows are quantised normal numbers of several sizes, random bytes with finite scales, and random bytes with the extremes of
scales: zeros of both signs, subnormals, the largest number, infinities and NaN.
"""

import sys

import gguf
import numpy as np

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]

# Byte offsets of the binary16 numbers of a block.
HALVES = {"F16": [0], "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
EXTREMES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01]
COLUMNS = 256


def rows_of(name, n, rng):
    qtype = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (n * COLUMNS // elements, size), dtype=np.uint8)
    half = len(blocks) // 2
    for at in HALVES.get(name, []):
        scales = rng.normal(0, 0.01, len(blocks)).astype(np.float16).view(np.uint16)
        scales[half:] = rng.choice(np.array(EXTREMES, dtype=np.uint16), len(blocks) - half)
        blocks[:, at : at + 2] = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(n, -1)
    try:
        values = (rng.normal(0, 1, (n, COLUMNS)) * 10.0 ** rng.integers(-6, 3, (n, 1))).astype(np.float32)
        data = np.concatenate([gguf.quants.quantize(values, qtype).view(np.uint8).reshape(n, -1), data])
    except NotImplementedError:  # the package decodes types of 256 elements a block, and does not encode them
        pass
    return qtype, data


def main():
    path, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rng = np.random.default_rng(61)
    w = gguf.GGUFWriter(path, "types")
    w.add_uint8("kinds.uint8", 200)
    w.add_int8("kinds.int8", -100)
    w.add_uint16("kinds.uint16", 60000)
    w.add_int16("kinds.int16", -30000)
    w.add_uint32("kinds.uint32", 4000000000)
    w.add_int32("kinds.int32", -2000000000)
    w.add_uint64("kinds.uint64", 1 << 63)
    w.add_int64("kinds.int64", -(1 << 62))
    w.add_float32("kinds.float32", 0.1)
    w.add_float64("kinds.float64", 0.1)
    w.add_bool("kinds.bool", True)
    w.add_string("kinds.string", "grüße")
    w.add_array("kinds.strings", ["a", "", "ß"])
    w.add_array("kinds.ints", [1, -2, 3])
    w.add_array("kinds.floats", [0.5, -0.25])
    w.add_array("kinds.bools", [True, False])
    w.add_array("kinds.nested", [[1, 2], [3]])
    for name in TYPES:
        qtype, data = rows_of(name, n, rng)
        with np.errstate(all="ignore"):
            want = gguf.quants.dequantize(data, qtype)
        w.add_tensor(name, data, raw_dtype=qtype)
        w.add_tensor(name + ".f32", want.astype(np.float32).reshape(len(data), COLUMNS))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
