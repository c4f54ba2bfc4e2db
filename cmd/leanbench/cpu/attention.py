"""A worker of leanbench: PyTorch's attention, timed when it is asked to.

    attention.py THREADS

Questions, one a line, and their answers:

    shape HEADS KVHEADS KEYS DIM DTYPE SETS    ok
    batch HEADS KVHEADS DIM DTYPE SETS LENGTHS ok
    run WAY STEPS                              ok SECONDS

LENGTHS are the keys of each sequence of a batch, with commas between. Those of
several lengths are attended to one sequence after the other. A step is one query of every head over KEYS keys; SETS operands take turns.
WAY is "sdpa", scaled_dot_product_attention as its documentation has it, or
"packed", where the query heads of a group are handed over as queries of one
head, which is the same without a mask.
"""

import gc
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Shape:
    def __init__(self, heads, kv_heads, keys, dim, dtype, sets):
        def noise(*shape):
            return (torch.rand(shape, dtype=torch.float32) * 2 - 1).to(DTYPES[dtype])

        self.q = 3 * noise(1, heads, 1, dim)
        self.packed_q = self.q.reshape(1, kv_heads, heads // kv_heads, dim)
        self.kv = [(noise(1, kv_heads, keys, dim), noise(1, kv_heads, keys, dim)) for _ in range(sets)]
        self.grouped = heads != kv_heads
        self.next = 0

        a, b = self.step("sdpa"), self.step("packed", 0)
        if not torch.allclose(a.reshape(-1).float(), b.reshape(-1).float(), atol=2e-2):
            raise ValueError("the two ways disagree")

    def step(self, way, which=None):
        k, v = self.kv[self.next if which is None else which]
        if which is None:
            self.next = (self.next + 1) % len(self.kv)
        if way == "sdpa":
            return sdpa(self.q, k, v, enable_gqa=self.grouped)
        return sdpa(self.packed_q, k, v)

    def run(self, way, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(way)
        return time.perf_counter() - begin


class Batch(Shape):
    def __init__(self, heads, kv_heads, dim, dtype, sets, lengths):
        def noise(*shape):
            return (torch.rand(shape, dtype=torch.float32) * 2 - 1).to(DTYPES[dtype])

        even = min(lengths) == max(lengths)
        parts = [(len(lengths), lengths[0])] if even else [(1, n) for n in lengths]
        self.q = [3 * noise(b, heads, 1, dim) for b, _ in parts]
        self.packed_q = [q.reshape(q.shape[0], kv_heads, heads // kv_heads, dim) for q in self.q]
        self.kv = [[(noise(b, kv_heads, n, dim), noise(b, kv_heads, n, dim)) for b, n in parts] for _ in range(sets)]
        self.grouped = heads != kv_heads
        self.next = 0
        for a, b in zip(self.step("sdpa"), self.step("packed", 0)):
            if not torch.allclose(a.reshape(-1).float(), b.reshape(-1).float(), atol=2e-2):
                raise ValueError("the two ways disagree")

    def step(self, way, which=None):
        operands = self.kv[self.next if which is None else which]
        if which is None:
            self.next = (self.next + 1) % len(self.kv)
        if way == "sdpa":
            return [sdpa(q, k, v, enable_gqa=self.grouped) for q, (k, v) in zip(self.q, operands)]
        return [sdpa(q, k, v) for q, (k, v) in zip(self.packed_q, operands)]


def main():
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(time.time_ns())
    shape = None
    print("ok PyTorch", torch.__version__, flush=True)
    for line in sys.stdin:
        word, *args = line.split()
        try:
            if word == "shape":
                shape = None  # its memory first
                heads, kv_heads, keys, dim, dtype, sets = args
                shape = Shape(int(heads), int(kv_heads), int(keys), int(dim), dtype, int(sets))
                gc.collect()
                gc.disable()
                print("ok", flush=True)
            elif word == "batch":
                shape = None
                heads, kv_heads, dim, dtype, sets, lengths = args
                shape = Batch(int(heads), int(kv_heads), int(dim), dtype, int(sets), [int(n) for n in lengths.split(",")])
                gc.collect()
                gc.disable()
                print("ok", flush=True)
            elif word == "run":
                way, steps = args
                print("ok", shape.run(way, int(steps)), flush=True)
            else:
                raise ValueError("unknown word " + word)
        except Exception as e:
            print("error", repr(e).replace("\n", " "), flush=True)


with torch.inference_mode():
    main()
