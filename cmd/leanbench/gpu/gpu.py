"""A worker of leanbench: attention of other programs on a GPU, timed when it is
asked to.

    gpu.py DEVICE

Questions, one a line, and their answers:

    arena BYTES                                        ok
    shape HEADS KVHEADS DIM SETS LAUNCHES LENGTHS      ok WAY ... [without TEXT]
    sdpa HEADS KVHEADS DIM SETS LAUNCHES LENGTHS       the same of FLASH_ATTENTION alone
    prompts HEADS KVHEADS DIM CAUSAL QUERIES LENGTHS LAUNCHES    the same
    linear ROWS IN OUT LAYERS                          the same
    run WAY REPLAYS                                    ok SECONDS ...

LENGTHS are the keys of each sequence with commas between, or BATCHxKEYS. A way
is a graph of LAUNCHES launches, whose operands are SETS that take turns in the
arena. run replays it once, which is not counted, and then REPLAYS times, and
answers the seconds of a launch in each. Prompts have the last QUERIES tokens of each sequence as
queries, and operands of their own. linear is a graph of LAYERS linear layers with
weights of their own. "flashinfer-plan" plans before every
launch, which a graph can't hold: its launches are queued one by one.
"""

import gc
import inspect
import os
import sys
import time

# Answers go where stdout goes, and what libraries print there to stderr.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

try:
    import flashinfer

    no_flashinfer = None
except Exception as e:
    flashinfer, no_flashinfer = None, repr(e)

PAGE = 16
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Shape:
    def __init__(self, arena, heads, kv_heads, dim, sets, launches, lengths, pages=True):
        self.launches, self.sets = launches, sets
        self.heads, self.kv_heads, self.dim, self.lengths = heads, kv_heads, dim, lengths
        self.arena = arena
        self.q = 3 * torch.randn(len(lengths), heads, 1, dim, dtype=torch.float16, device="cuda")
        self.stream = torch.cuda.Stream()
        self.ways, self.missing, self.keep = {}, [], []
        if min(lengths) == max(lengths):
            for name, backend in BACKENDS.items():
                if pages or name == "flash":
                    self.add(name, lambda b=backend: self.sdpa(b))
            self.compare(self.ways)
            if not pages:
                self.check_flash()
        else:
            self.missing.append("PyTorch's scaled_dot_product_attention, which has no ragged batches")
            self.add("flash-varlen", self.varlen)
            self.check_varlen()
        if not pages:
            pass
        elif flashinfer is None:
            self.missing.append("FlashInfer: " + no_flashinfer)
        else:
            self.page()
            self.add("flashinfer", lambda: self.flashinfer(False))
            self.add("flashinfer-tc", lambda: self.flashinfer(True))
            # With as many KV heads of 128 as heads it takes a workspace of 3 GB and more.
            if self.heads != self.kv_heads or self.dim < 128:
                self.add("flashinfer-batch", self.batch_attention)
            else:
                self.missing.append("FlashInfer's BatchAttention, which takes a workspace of 3 GB and more for MHA of 128")
            self.compare([name for name in self.ways if name.startswith("flashinfer")])
            # The plan of the one that is meant for such groups.
            if self.planned is not None:
                self.add("flashinfer-plan", lambda: self.planned, graph=False)

    def add(self, name, make, graph=True):
        try:
            step = make()
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                for i in range(min(self.sets, 3)):
                    step(i)
            torch.cuda.synchronize()
            if graph:
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g, stream=self.stream):
                    for i in range(self.launches):
                        step(i % self.sets)
                replay = g.replay
            else:

                def replay():
                    for i in range(self.launches):
                        step(i % self.sets)

            self.ways[name] = (replay, step)
        except Exception as e:
            self.missing.append(name + ": " + (repr(e).splitlines() or [""])[0][:200])
            torch.cuda.synchronize()

    def operands(self, i):
        b, n = len(self.lengths), self.lengths[0]
        size = b * self.kv_heads * n * self.dim
        at = 2 * size * i
        k = self.arena[at : at + size].view(b, self.kv_heads, n, self.dim)
        v = self.arena[at + size : at + 2 * size].view(b, self.kv_heads, n, self.dim)
        return k, v

    def sdpa(self, backend):
        sets = [self.operands(i) for i in range(self.sets)]
        grouped = self.heads != self.kv_heads

        def step(i):
            with sdpa_kernel(backend):
                return sdpa(self.q, *sets[i], enable_gqa=grouped)

        return step

    def varlen(self):
        """FLASH_ATTENTION for keys and values of all sequences one behind the other. It splits no context."""
        from torch.nn.attention.varlen import varlen_attn

        counts = lambda list: torch.tensor([0] + list, device="cuda").cumsum(0).to(torch.int32)
        queries, keys = counts([1] * len(self.lengths)), counts(self.lengths)
        rows = self.q.view(len(self.lengths), self.heads, self.dim)
        size = sum(self.lengths) * self.kv_heads * self.dim
        layout = (sum(self.lengths), self.kv_heads, self.dim)
        # The operands of pages take as much and more.
        sets = [(self.arena[2 * size * i :][:size].view(layout), self.arena[2 * size * i + size :][:size].view(layout)) for i in range(self.sets)]
        self.keep.append((queries, keys, sets[0]))
        # Older ones take groups without being told.
        told = self.heads != self.kv_heads and "enable_gqa" in inspect.signature(varlen_attn).parameters
        more = {"enable_gqa": True} if told else {}
        return lambda i: varlen_attn(rows, *sets[i], queries, keys, 1, max(self.lengths), **more)

    def check_varlen(self):
        """Compares the shortest sequence with sums in float32: the others have pages instead."""
        if "flash-varlen" not in self.ways:
            return
        i = min(range(len(self.lengths)), key=self.lengths.__getitem__)
        begin = sum(self.lengths[:i])
        k, v = (x[begin : begin + self.lengths[i]].float().repeat_interleave(self.heads // self.kv_heads, 1) for x in self.keep[-1][2])
        weights = (torch.einsum("hd,nhd->hn", self.q[i, :, 0].float(), k) / self.dim**0.5).softmax(-1)
        want, got = torch.einsum("hn,nhd->hd", weights, v), self.ways["flash-varlen"][1](0)[i].float()
        if not (got - want).abs().max() <= 0.02 * want.abs().max():
            raise ValueError("flash-varlen disagrees with float32")

    def check_flash(self):
        """Compares the last head of the last sequence, which lies furthest into the operands, with sums in float32."""
        if "flash" not in self.ways:
            return
        k, v = (x[-1, -1].float() for x in self.operands(0))
        weights = (k @ self.q[-1, -1, 0].float() / self.dim**0.5).softmax(0)
        want, got = weights @ v, self.ways["flash"][1](0)[-1, -1, 0].float()
        if not (got - want).abs().max() <= 0.02 * want.abs().max():
            raise ValueError("flash disagrees with float32")

    def compare(self, names):
        """Leaves out who does not agree with most: a speed is worth something only if the work was done."""
        outs = {name: self.ways[name][1](0).float() for name in names}
        agrees = lambda out, want: bool((out - want).abs().max() <= 0.02 * want.abs().max())
        for name, out in outs.items():
            if 2 * sum(agrees(out, want) for want in outs.values()) <= len(outs):
                del self.ways[name]
                self.missing.append(name + ": its output is not that of most of " + ", ".join(outs))

    def page(self):
        """Has keys and values in pages, in no order."""
        per = [(n + PAGE - 1) // PAGE for n in self.lengths]
        pages = sum(per)
        self.starts = torch.tensor([0] + per).cumsum(0).to(torch.int32)
        self.order = torch.randperm(pages).to(torch.int32).cuda()
        self.last = torch.tensor([n - (p - 1) * PAGE for n, p in zip(self.lengths, per)], dtype=torch.int32)
        size = pages * PAGE * self.kv_heads * self.dim
        layout = (pages, PAGE, self.kv_heads, self.dim)  # NHD, which is FlashInfer's own
        self.paged = [
            (self.arena[2 * size * i :][:size].view(layout), self.arena[2 * size * i + size :][:size].view(layout))
            for i in range(self.sets)
        ]
        self.rows = self.q.view(len(self.lengths), self.heads, self.dim)
        self.planned = None

    def flashinfer(self, tensor_cores):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)

        def plan():
            # Lengths are on the host already, as an engine that schedules has them.
            wrapper.plan(self.starts, self.order, self.last, self.heads, self.kv_heads, self.dim, PAGE, data_type=torch.float16)

        def step(i):
            return wrapper.run(self.rows, self.paged[i])

        def planned(i):
            plan()
            return step(i)

        self.keep.append((workspace, wrapper))
        plan()
        if tensor_cores == (self.heads // self.kv_heads >= 4):
            self.planned = planned
        return step

    def batch_attention(self):
        wrapper = flashinfer.BatchAttention("NHD")
        wrapper.float_workspace_buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        queries = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device="cuda")
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        wrapper.plan(
            queries, self.starts.cuda(), self.order, lengths, self.heads, self.kv_heads, self.dim, self.dim, PAGE,
            q_data_type=torch.float16, kv_data_type=torch.float16,
        )
        self.keep.append((wrapper, queries, lengths))
        return lambda i: wrapper.run(self.rows, self.paged[i])[0]

    def run(self, way, replays):
        replay = self.ways[way][0]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        with torch.cuda.stream(self.stream):
            replay()
            for m in marks[:-1]:
                m.record()
                replay()
            marks[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / self.launches for a, b in zip(marks, marks[1:])]


class Prompts(Shape):
    """A step of many queries. Where there are more keys, CUDNN_ATTENTION has no causal mask
    whose last query sees the last key: it gets none, which is some more work."""

    def __init__(self, heads, kv_heads, dim, causal, queries, lengths, launches):
        self.launches, self.sets = launches, 1
        self.heads, self.kv_heads, self.dim, self.lengths = heads, kv_heads, dim, lengths
        self.causal, self.queries = bool(causal), queries
        batch, keys = len(lengths), lengths[0]
        make = lambda heads, n: torch.randn(batch, heads, n, dim, dtype=torch.float16, device="cuda")
        self.q, self.k, self.v = 3 * make(heads, queries), make(kv_heads, keys), make(kv_heads, keys)
        self.stream = torch.cuda.Stream()
        self.ways, self.missing, self.keep = {}, [], []
        behind = self.causal and queries < keys
        self.add("flash", lambda: self.attend("flash", behind))
        if behind:
            self.add("cudnn-unmasked", lambda: self.attend("cudnn", behind))
        else:
            self.add("cudnn", lambda: self.attend("cudnn", behind))
        if flashinfer is None:
            self.missing.append("FlashInfer: " + no_flashinfer)
        else:
            self.add("flashinfer-paged", self.paged_prefill)
        self.compare([name for name in self.ways if name != "cudnn-unmasked"])

    def attend(self, backend, behind):
        options = {"enable_gqa": self.heads != self.kv_heads}
        if not behind:
            options["is_causal"] = self.causal
        elif backend == "flash":
            options["attn_mask"] = causal_lower_right(self.queries, self.lengths[0])

        def step(i):
            with sdpa_kernel(BACKENDS[backend]):
                return sdpa(self.q, self.k, self.v, **options)

        return step

    def paged_prefill(self):
        batch, keys = len(self.lengths), self.lengths[0]
        per = (keys + PAGE - 1) // PAGE
        pages = lambda x: torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, per * PAGE - keys)).reshape(batch * per, PAGE, self.kv_heads, self.dim)
        order = torch.randperm(batch * per, device="cuda")
        cache = []
        for x in (self.k, self.v):
            p = torch.empty(batch * per, PAGE, self.kv_heads, self.dim, dtype=torch.float16, device="cuda")
            p[order] = pages(x)
            cache.append(p)
        counts = lambda n: torch.arange(batch + 1, dtype=torch.int32, device="cuda") * n
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        last = torch.full((batch,), keys - (per - 1) * PAGE, dtype=torch.int32, device="cuda")
        wrapper.plan(
            counts(self.queries), counts(per), order.to(torch.int32), last, self.heads, self.kv_heads, self.dim, PAGE,
            causal=self.causal, q_data_type=torch.float16, kv_data_type=torch.float16,
        )
        rows = self.q.transpose(1, 2).reshape(batch * self.queries, self.heads, self.dim).contiguous()
        self.keep.append((workspace, wrapper))
        run = lambda: wrapper.run(rows, tuple(cache))
        return lambda i: run().view(batch, self.queries, self.heads, self.dim).transpose(1, 2)


class Linear(Shape):
    def __init__(self, rows, into, out, layers):
        self.launches = self.sets = layers
        make = lambda *shape: torch.randn(*shape, dtype=torch.float16, device="cuda")
        x, b, weights = make(rows, into), make(out), [make(out, into) / into**0.5 for _ in range(layers)]
        self.stream = torch.cuda.Stream()
        self.ways, self.missing = {}, []
        self.add("cublas", lambda: lambda i: torch.nn.functional.linear(x, weights[i], b))


def say(*words):
    print(*words, file=answers, flush=True)


def lengths_of(text):
    if "x" in text:
        batch, keys = text.split("x")
        return [int(keys)] * int(batch)
    return [int(n) for n in text.split(",")]


def make_arena(size):
    arena = torch.empty(size // 2, dtype=torch.float16, device="cuda")
    for part in arena.split(1 << 28):
        part.uniform_(-1, 1)
    torch.cuda.synchronize()
    return arena


def main():
    torch.cuda.set_device(int(sys.argv[1]))
    torch.manual_seed(time.time_ns())
    arena = shape = None
    hello = ["PyTorch", torch.__version__, "with CUDA", str(torch.version.cuda) + ",", "cuDNN", str(torch.backends.cudnn.version())]
    if flashinfer is not None:
        hello += ["and FlashInfer", getattr(flashinfer, "__version__", "of unknown version")]
    say("ok", *hello)
    for line in sys.stdin:
        word, *args = line.split()
        try:
            if word == "arena":
                arena = shape = None  # their memory first
                gc.collect()
                torch.cuda.empty_cache()
                arena = make_arena(int(args[0]))
                say("ok")
            elif word in ("shape", "sdpa"):
                shape = None  # its memory first
                gc.enable()
                gc.collect()
                torch.cuda.empty_cache()
                shape = Shape(arena, *map(int, args[:5]), lengths_of(args[5]), word == "shape")
                gc.collect()
                gc.disable()
                text = ["without", "; ".join(shape.missing)] if shape.missing else []
                say("ok", *shape.ways, *text)
            elif word in ("prompts", "linear"):
                shape = None
                gc.enable()
                gc.collect()
                torch.cuda.empty_cache()
                if word == "prompts":
                    shape = Prompts(*map(int, args[:5]), lengths_of(args[5]), int(args[6]))
                else:
                    shape = Linear(*map(int, args))
                gc.collect()
                gc.disable()
                text = ["without", "; ".join(shape.missing)] if shape.missing else []
                say("ok", *shape.ways, *text)
            elif word == "run":
                say("ok", *shape.run(args[0], int(args[1])))
            else:
                raise ValueError("unknown word " + word)
        except Exception as e:
            say("error", repr(e).replace("\n", " "))


with torch.inference_mode():
    main()
