"""A worker of leanbench: PyTorch's attention and its gradients, timed when it is asked to.

    gradients.py THREADS

Questions, one a line, and their answers:

    shape HEADS QUERIES KEYS DIM DTYPE CAUSAL BACKWARD    ok
    run STEPS                                             ok SECONDS
    threads THREADS                                       ok

A step is scaled_dot_product_attention of one sequence, and with BACKWARD the
gradients in query, key and value behind it. CAUSAL and BACKWARD are true or false.
"""

import gc
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


class Shape:
    def __init__(self, heads, queries, keys, dim, dtype, causal, backward):
        def noise(rows):
            return torch.randn((1, heads, rows, dim), dtype=DTYPES[dtype])

        self.operands = [noise(queries), noise(keys), noise(keys)]
        self.gradient = noise(queries)
        self.causal, self.backward = causal, backward
        for x in self.operands:
            x.requires_grad_(backward)

    def step(self):
        out = sdpa(*self.operands, is_causal=self.causal)
        if self.backward:
            torch.autograd.grad(out, self.operands, self.gradient)

    def run(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - begin


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
                heads, queries, keys, dim, dtype, causal, backward = args
                shape = Shape(int(heads), int(queries), int(keys), int(dim), dtype, causal == "true", backward == "true")
                gc.collect()
                gc.disable()
                print("ok", flush=True)
            elif word == "threads":
                torch.set_num_threads(int(args[0]))
                print("ok", flush=True)
            elif word == "run":
                print("ok", shape.run(int(args[0])), flush=True)
            else:
                raise ValueError("unknown word " + word)
        except Exception as e:
            print("error", repr(e).replace("\n", " "), flush=True)


main()
