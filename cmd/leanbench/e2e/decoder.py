"""A worker of leanbench: a decoder in transformers on a GPU, timed when it is asked to.

    decoder.py DEVICE

DEVICE is PyTorch's name of it, such as cuda:0. Questions, one a line, and their
answers:

    model DTYPE CONFIG                               ok
    threads THREADS                                  ok
    read WAY BATCH CONTEXT STEPS                     ok [TEXT]
    run WAY STEPS                                    ok SECONDS ID ...
    prompt BATCH LENGTH [TIMES]                      ok SECONDS ID
    forget                                           ok

model makes a model with random weights, on the device and in PyTorch's DTYPE from the
start. CONFIG is its config.json in one line. read lets a way read BATCH
prompts of CONTEXT tokens each, and prepares it for up to STEPS steps; TEXT is
what should be known of it. What a way that fails has taken is given back. forget gives back the memory of all that was read.
run adds a token to each sequence, the most likely
one, STEPS times, always behind the prompts alone. SECONDS is the time of these
steps; the ids are what the first sequence got, one before the steps and one in
each.

prompt reads BATCH prompts of LENGTH tokens each into a new DynamicCache: SECONDS is
the time until the token behind each is there, TIMES times. The first such prompts are read once
before that.

WAY is "eager", with a DynamicCache, or "compiled": a step with a StaticCache,
compiled into one CUDA graph. Both use scaled_dot_product_attention and compute
the logits of the last position alone. No step waits for the GPU of itself.
"""

import gc
import json
import os
import sys
import time

# Answers go where stdout goes, and what libraries print there to stderr.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
import transformers
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

try:
    from transformers.initialization import no_init_weights
except ImportError:  # it only saves time
    from contextlib import nullcontext as no_init_weights


def make_model(dtype, fields):
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.tie_weights()
    # On a CPU a billion normal numbers take a minute, so all matrices have the same ones. Their number is odd, so that rows differ.
    noise = torch.empty((1 << 24) - 1, dtype=dtype, device=device).normal_(std=0.02)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            for part in p.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])
        else:
            p.fill_(1 if name.endswith("norm.weight") else 0)
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    if tied != fields["tie_word_embeddings"]:
        raise ValueError("the head is " + ("" if tied else "not ") + "the token embedding")
    for name, p in model.named_parameters():
        if p.dtype != dtype or p.device != device:
            raise ValueError(f"{name} is of {p.dtype} on {p.device}")
    return model


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Way:
    def __init__(self, model, cache, batch, context):
        self.model, self.cache, self.batch, self.context = model, cache, batch, context
        vocab = model.config.vocab_size
        ids = [[4 + (7919 * i + 104729 * s) % (vocab - 4) for i in range(context)] for s in range(batch)]
        self.first = self.next(torch.tensor(ids, device=device))

    def next(self, ids, **where):
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **where)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def run(self, steps):
        self.rewind()
        wait()
        begin = time.perf_counter()
        texts = self.decode(steps)
        wait()
        seconds = time.perf_counter() - begin
        return seconds, [int(self.first[0]), *texts[0].tolist()]


class Eager(Way):
    def __init__(self, model, batch, context, steps):
        super().__init__(model, DynamicCache(config=model.config), batch, context)
        self.decode(3)  # the first steps load kernels
        self.note = ""

    def rewind(self):
        more = self.cache.get_seq_length() - self.context
        if more > 0:
            self.cache.crop(-more)

    def decode(self, steps):
        ids, chosen = self.first, []
        for _ in range(steps):
            ids = self.next(ids)
            chosen.append(ids)
        return torch.cat(chosen, 1)


class Compiled(Way):
    def __init__(self, model, batch, context, steps):
        room = -(-(context + steps) // 64) * 64  # a mask whose rows are aligned costs no copy
        super().__init__(model, StaticCache(config=model.config, max_cache_len=room), batch, context)
        # What a step changes keeps its address: it is then part of the CUDA graph,
        # and a replay needs nothing from here.
        self.ids = self.first.clone()
        self.texts = torch.zeros((batch, room), dtype=torch.int64, device=device)
        torch._dynamo.mark_static_address(self.ids)
        torch._dynamo.mark_static_address(self.texts)

        counters.clear()
        self.step = torch.compile(self.one, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self.decode(min(5, steps))  # compiles, warms up, captures and replays
        skips = counters["inductor"]["cudagraph_skips"]
        self.note = f"{skips} CUDA graphs were skipped" if skips else ""

    def one(self):
        # The cache counts its tokens where the model's first layer adds to them.
        at = self.cache.layers[0].cumulative_length.clone()
        room = self.texts.shape[1]
        # A mask of four dimensions is used as it is, and with positions given too
        # the model does not ask the GPU for the length.
        mask = (torch.arange(room, device=device) <= at).view(1, 1, 1, room).expand(self.batch, 1, 1, room)
        chosen = self.next(self.ids, attention_mask=mask, position_ids=at.view(1, 1).expand(self.batch, 1))
        self.texts.index_copy_(1, at.view(1), chosen)
        self.ids.copy_(chosen)

    def rewind(self):
        self.ids.copy_(self.first)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    def decode(self, steps):
        for _ in range(steps):
            self.step()
        return self.texts[:, self.context : self.context + steps]


def prompt(model, warm, batch, length, times=1):
    if (batch, length) not in warm:
        warm.add((batch, length))
        Way(model, DynamicCache(config=model.config), batch, length)
    vocab = model.config.vocab_size
    ids = torch.tensor([[4 + (7919 * i + 104729 * s) % (vocab - 4) for i in range(length)] for s in range(batch)])
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        out = model(ids.to(device), past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
    first = out.logits[:, -1].argmax(-1).tolist()
    return time.perf_counter() - begin, first[0]


WAYS = {"eager": Eager, "compiled": Compiled}


def release(compiled=True):
    """Gives back what nobody refers to, and what was compiled: other processes need the GPU's memory."""
    if compiled:
        torch._dynamo.reset()
    gc.enable()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def say(*words):
    print(*words, file=answers, flush=True)


def main():
    torch.manual_seed(time.time_ns())
    transformers.logging.set_verbosity_error()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # without a GPU this fails here, not in the first case
    model, ways, warm = None, {}, set()
    say("ok transformers", transformers.__version__ + ",", "PyTorch", torch.__version__)
    for line in sys.stdin:
        word, *args = line.split()
        failed = ""
        try:
            if word == "model":
                model, ways, warm = None, {}, set()  # their memory first
                release()
                model = make_model(getattr(torch, args[0]), json.loads(args[1]))
                say("ok")
            elif word == "threads":
                torch.set_num_threads(int(args[0]))
                say("ok")
            elif word == "forget":
                ways = {}
                release()
                say("ok")
            elif word == "read":
                ways.pop(args[0], None)
                ways[args[0]] = WAYS[args[0]](model, *map(int, args[1:]))
                gc.collect()
                gc.disable()
                say("ok", ways[args[0]].note)
            elif word == "prompt":
                say("ok", *prompt(model, warm, *map(int, args)))
            elif word == "run":
                seconds, ids = ways[args[0]].run(int(args[1]))
                say("ok", seconds, *ids)
            else:
                raise ValueError("unknown word " + word)
        except Exception as e:
            failed = " ".join(repr(e).split())[:2000]
        if failed:  # only now does nobody refer to what it had
            release(compiled=not ways)
            say("error", failed)


device = torch.device(sys.argv[1])
with torch.no_grad():
    main()
