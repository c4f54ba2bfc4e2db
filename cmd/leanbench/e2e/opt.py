"""A worker of leanbench: OPT in transformers or CTranslate2, timed when it is
asked to.

    opt.py THREADS transformers FOLDER
    opt.py THREADS ctranslate2 FOLDER CONVERTED TYPE

FOLDER is a checkpoint of Hugging Face's. CTranslate2 reads its own format:
CONVERTED is the folder for that, and written if it is not there; TYPE is what it
computes in, float32 or int8.

The question and its answer:

    decode BATCH CONTEXT STEPS    ok PROMPT_SECONDS SECONDS ID ...

BATCH sequences of CONTEXT tokens each are read, and then STEPS times one token
is added to each, the most likely one. SECONDS is the time of these steps, and
the ids are what the first sequence got, one before the steps and one in each.
"""

import json
import os
import sys
import time

THREADS = int(sys.argv[1])


def prompt(sequence, context, vocab):
    return [4 + (7919 * i + 104729 * sequence) % (vocab - 4) for i in range(context)]


class Transformers:
    def __init__(self, folder):
        import torch
        import transformers

        self.torch = torch
        torch.set_num_threads(THREADS)
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.name = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"

        self.read = None  # the prompts that were read last, which the next turn can begin behind

    def decode(self, batch, context, steps):
        torch = self.torch
        with torch.inference_mode():
            if self.read != (batch, context):
                self.cache, self.read = None, (batch, context)
                ids = torch.tensor([prompt(s, context, self.model.config.vocab_size) for s in range(batch)])
                begin = time.perf_counter()
                self.first = self.next(ids)
                self.prompt_time = time.perf_counter() - begin
            else:
                self.cache.crop(context)
            ids, chosen = self.first, [int(self.first[0])]
            begin = time.perf_counter()
            for _ in range(steps):
                ids = self.next(ids)
                chosen.append(int(ids[0]))
        return self.prompt_time, time.perf_counter() - begin, chosen

    def next(self, ids):
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[:, -1].argmax(-1, keepdim=True)


class CTranslate2:
    def __init__(self, folder, converted, compute_type):
        import ctranslate2

        if not os.path.exists(converted):
            # Written elsewhere first: a conversion that is broken off is not taken for one.
            parts = converted + ".part"
            ctranslate2.converters.TransformersConverter(folder).convert(parts, force=True)
            os.rename(parts, converted)
        self.model = ctranslate2.Generator(
            converted, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=THREADS)
        with open(os.path.join(folder, "vocab.json")) as f:
            self.ids = json.load(f)
        self.tokens = {i: token for token, i in self.ids.items()}
        self.name = f"CTranslate2 {ctranslate2.__version__} {self.model.compute_type}"

    def decode(self, batch, context, steps):
        prompts = [[self.tokens[i] for i in prompt(s, context, len(self.tokens))] for s in range(batch)]
        chosen, times = [], []

        def token(result):
            # Called for each sequence in each step.
            if result.batch_id == 0:
                chosen.append(result.token_id)
                times.append(time.perf_counter())
            return False

        begin = time.perf_counter()
        self.model.generate_batch(
            prompts, max_length=1 + steps, min_length=1 + steps, include_prompt_in_result=False,
            beam_size=1, sampling_topk=1, callback=token)
        if len(chosen) != 1 + steps:
            raise ValueError(f"{len(chosen)} tokens of {1 + steps}")
        return times[0] - begin, times[-1] - times[0], chosen


def main():
    model = {"transformers": Transformers, "ctranslate2": CTranslate2}[sys.argv[2]](*sys.argv[3:])
    print("ok", model.name, flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        try:
            if word != "decode":
                raise ValueError("unknown word " + word)
            prompt_seconds, seconds, chosen = model.decode(*map(int, numbers))
            print("ok", prompt_seconds, seconds, *chosen, flush=True)
        except Exception as e:
            print("error", repr(e).replace("\n", " "), flush=True)


main()
