"""Makes kinds.json.gz, patterns.json.gz and categories.json.gz: small tokenizers of every kind with what their own
programs make of texts, what Oniguruma makes of the patterns of pre-tokenizers, and its kinds of characters.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 mistral-common==1.13.1
    LEANATTENTION_PATTERNS=/tmp/patterns.json go test -run TestPatterns .     # the patterns of package tokenizer
    python kinds.py /tmp/patterns.json

kinds.json.gz        [{"name", "file", "data" in base64, "rows"}]; rows are those of golden.jsonl (see real.py)
patterns.json.gz     {pattern: [[text, [piece, ...]], ...]}
categories.json.gz   [[first code point, general category], ...] up to the next row
"""

import base64
import gzip
import json
import os
import random
import sys
import tempfile

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

rng = random.Random(61)
corpus = """The quick brown fox doesn't jump over the lazy dogs, 12345 times; it's HERE'S what they'll say.
def main():\n    return [x ** 2 for x in range(10)]\n\n
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Съешь же ещё этих мягких французских булок, да выпей чаю.
日本語の文章をここに書きます。 敏捷的棕色狐狸跳过了懒狗。 다람쥐 헌 쳇바퀴에 타고파.
नमस्ते दुनिया, यह एक वाक्य है। สวัสดีชาวโลก นี่คือประโยค مرحبا بالعالم هذه جملة שלום עולם זה משפט
Καλημέρα κόσμε, αυτή είναι μια πρόταση. ქართული ენა Հայերեն լեզու ภาษาไทย
""".split("\n") * 3
pieces = ["a", "B", "aA", "Aa", "'s", "'S", "'ll", "'Ll", "'ſ", "'", "1", "12", "1234", "٣", "½", "Ⅷ", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b",
          "\x1c", "\u200b", "\u200d", "▁", "_", "<0x0A>", "</s>", "<s>", "<unk>", "<x>", "<|", "ﬁ", "Ａ", "é", "e\u0301", "\u0301", "\u0300\u0316", "か\u3099", "\u1100\u1161\u11a8", "日本", "한", "ไทย",
          "हिन्दी", "👩\u200d👧", "🇩🇪", "👍🏽", "ǅ", "ß", "İ", "K", "!", "?!", "...", "//", "/", "=>", "$", "€", "^", "`", "|", "~", "+", "#", "\x00", "\ufffd", "\U000e0001", "\u0897", "\U0001e5f1",
          "\U00010d40", "\U000105c0", "\u1171e", "\U00011935\U00011930", "\u32ff", "\u07fd", "Hello", " world", "x=1;", "the", " jump", "ъ", "שלום", "    "]


def texts(n):
    yield ""
    for _ in range(n):
        kind = rng.random()
        if kind < 0.2:
            line = rng.choice(corpus)
            at = rng.randint(0, len(line))
            yield line[at:at + rng.randint(0, 40)]
        elif kind < 0.3:
            yield rng.choice(pieces) * rng.randint(1, 40)
        else:
            yield "".join(rng.choices(pieces, k=rng.randint(1, 14)))


kinds = []


def put(name, file, data, rows):
    kinds.append({"name": name, "file": file, "data": base64.b64encode(data).decode(), "rows": list(rows)})


def random_ids(n, size):
    for _ in range(n):
        yield [rng.randrange(size) for _ in range(rng.randint(1, 8))]


def hugging_face(name, model, trainer, normalizer=None, pre=None, post=None, decoder=None, added=(), edit=None):
    tok = Tokenizer(model)
    if normalizer:
        tok.normalizer = normalizer
    if pre:
        tok.pre_tokenizer = pre
    tok.train_from_iterator(corpus, trainer)
    tok.decoder = decoder
    tok.add_tokens(list(added))
    j = json.loads(tok.to_str())
    j["post_processor"] = post
    if edit:
        edit(j)
    beyond = len(j["model"]["vocab"])
    for t in j["added_tokens"]:
        if isinstance(j["model"]["vocab"], dict) and t["content"] not in j["model"]["vocab"]:
            t["id"], beyond = beyond, beyond + 1
    data = json.dumps(j, ensure_ascii=False).encode()
    tok = Tokenizer.from_str(data.decode())

    def rows():
        for text in texts(150):
            tok.encode_special_tokens = False
            ids = tok.encode(text).ids
            tok.encode_special_tokens = True
            yield {"t": text, "i": ids, "s": tok.encode(text).ids, "d": tok.decode(ids)}
        for ids in random_ids(40, tok.get_vocab_size()):
            yield {"r": ids, "d": tok.decode(ids)}

    put(name, "tokenizer.json", data, rows())


byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


C = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
llama3 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
qwen = llama3.replace("{1,3}", "")
U, L = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
gpt4o = rf"[^\r\n\p{{L}}\p{{N}}]?{U}*{L}+{C}?|[^\r\n\p{{L}}\p{{N}}]?{U}+{L}*{C}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
deepseek = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""".replace("\\r", "\r").replace("\\n", "\n")
bpe = dict(vocab_size=420, show_progress=False)
template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
names = ["<unk>", "<s>", "</s>"]


def with_(**keys):
    return lambda j: j["model"].update(keys)


def byte_trainer():
    return trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=names, **bpe)


hugging_face("llama 3", models.BPE(), byte_trainer(), pre=pre_tokenizers.Sequence([split(llama3), byte_level]), decoder=decoders.ByteLevel(), post=template, edit=with_(ignore_merges=True))
hugging_face("qwen", models.BPE(), byte_trainer(), normalizers.NFC(), pre_tokenizers.Sequence([split(qwen), byte_level]), decoder=decoders.ByteLevel(), added=[AddedToken("<x>", normalized=True)])
hugging_face("gpt-4o", models.BPE(), byte_trainer(), pre=pre_tokenizers.Sequence([split(gpt4o, "removed", True), byte_level]), decoder=decoders.ByteLevel())
hugging_face("deepseek", models.BPE(), byte_trainer(), normalizers.Sequence([]), pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(deepseek), byte_level]), decoder=decoders.ByteLevel(),
             added=[AddedToken("<x>", lstrip=True, rstrip=True), AddedToken("Hello", single_word=True)])


def fallback(j):
    """Adds tokens for bytes."""
    vocab = j["model"]["vocab"]
    for b in range(256):
        vocab.setdefault("<0x%02X>" % b, len(vocab))
    j["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")


def some_fallback(j):
    """Adds tokens for some bytes."""
    fallback(j)
    for b in range(0x80, 0x100, 3):
        del j["model"]["vocab"]["<0x%02X>" % b]
    j["model"].update(fuse_unk=False)


prefix = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
parts = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
char_trainer = dict(special_tokens=names, limit_alphabet=80, **bpe)
hugging_face("llama 2", models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**char_trainer), normalizers.Sequence(prefix), decoder=parts, post=template, edit=fallback, added=[AddedToken("<x>", normalized=True)])
hugging_face("gemma", models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**char_trainer), normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"),
             decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), edit=fallback, added=["\n\n", "   "])
hugging_face("some bytes", models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**char_trainer), normalizers.NFKD(), pre_tokenizers.Metaspace(prepend_scheme="first"), decoder=decoders.Metaspace(prepend_scheme="first"), edit=some_fallback)
hugging_face("metaspace", models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**char_trainer), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
             pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation("merged_with_next")]),
             decoder=decoders.Metaspace(prepend_scheme="never"))
unigram = dict(vocab_size=300, unk_token="<unk>", special_tokens=names, show_progress=False)
always = dict(replacement="▁", prepend_scheme="always")


def unigram_bytes(j):
    j["model"]["vocab"] += [["<0x%02X>" % b, -99.0] for b in range(256)]
    j["model"]["byte_fallback"] = True


hugging_face("unigram", models.Unigram(), trainers.UnigramTrainer(**unigram), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace(Regex(" {2,}"), " ")]),
             pre_tokenizers.Metaspace(**always), post=template, decoder=decoders.Metaspace(**always))
hugging_face("unigram with bytes", models.Unigram(), trainers.UnigramTrainer(**unigram), pre=pre_tokenizers.Metaspace(**always), decoder=parts, edit=unigram_bytes)

with tempfile.TemporaryDirectory() as dir:
    with open(dir + "/corpus", "w") as f:
        f.write("\n".join(line for line in corpus if line))
    with open(dir + "/rules", "w") as f:  # a small charsmap
        for a, b in [("Ａ", "a"), ("ﬁ", "fi"), ("\t", " "), ("\n", " "), ("e\u0301", "é"), ("e", "E"), ("\u200b", ""), ("½", " 1/2 "), ("\u3000", " "), ("か\u3099", "が"), ("\r", " ")]:
            f.write(" ".join("%X" % ord(c) for c in a) + "\t" + " ".join("%X" % ord(c) for c in b) + "\n")
    for name, options in {
        "spm unigram": dict(model_type="unigram"),
        "spm unigram with bytes": dict(model_type="unigram", byte_fallback=True, vocab_size=520, remove_extra_whitespaces=False, user_defined_symbols=["<x>", "the"]),
        "spm unigram with a suffix": dict(model_type="unigram", treat_whitespace_as_suffix=True, user_defined_symbols=["<x>"]),
        "spm bpe": dict(model_type="bpe", user_defined_symbols=["<x>", "the"], control_symbols=["<c>"]),
        "spm bpe with bytes": dict(model_type="bpe", byte_fallback=True, vocab_size=560, add_dummy_prefix=False, remove_extra_whitespaces=False),
    }.items():
        rules = dict(normalization_rule_name="identity") if name == "spm bpe with bytes" else dict(normalization_rule_tsv=dir + "/rules")
        sentencepiece.SentencePieceTrainer.train(input=dir + "/corpus", model_prefix=dir + "/m", minloglevel=2, **{"vocab_size": 300, "hard_vocab_limit": False, "character_coverage": 0.98, **rules, **options})
        tok = sentencepiece.SentencePieceProcessor(model_file=dir + "/m.model")
        bos = [tok.bos_id()] if "bpe" in name else []
        rows = [{"t": text, "s": ids, "d": tok.decode(ids)} for text in texts(150) for ids in [bos + tok.encode(text)]]
        rows += [{"r": ids, "d": tok.decode(ids)} for ids in random_ids(60, tok.get_piece_size())]
        put(name, "tokenizer.model", open(dir + "/m.model", "rb").read(), rows)
        if name == "spm unigram":  # its charsmap as Hugging Face has it
            import sentencepiece.sentencepiece_model_pb2 as pb

            proto = pb.ModelProto()
            proto.ParseFromString(open(dir + "/m.model", "rb").read())
            hugging_face("precompiled", models.Unigram(), trainers.UnigramTrainer(**unigram), normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap), pre_tokenizers.Metaspace(**always),
                         decoder=decoders.Metaspace(**always))

# Tekken: the vocabulary is that of a small BPE by ranks.
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

tok = Tokenizer(models.BPE())
tok.pre_tokenizer = pre_tokenizers.Sequence([split(gpt4o), byte_level])
tok.train_from_iterator(corpus, trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=420, show_progress=False))
byte_of = {c: b for b, c in enumerate(chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else chr(256 + [x for x in range(256) if not (33 <= x <= 126 or 161 <= x <= 172 or x >= 174)].index(b)) for b in range(256))}
ordered = [bytes([b]) for b in range(256)] + [bytes(byte_of[c] for c in t) for t, _ in sorted(tok.get_vocab().items(), key=lambda x: x[1]) if len(t) > 1]
specials = [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(["<unk>", "<s>", "</s>", "[INST]", "<x>"])]
for version, special in {"v7": None, "v11": specials}.items():
    data = json.dumps({"config": {"pattern": gpt4o.replace(C + "?", ""), "num_vocab_tokens": len(ordered), "default_vocab_size": len(ordered) - 7 + 30, "default_num_special_tokens": 30, "version": version},
                       "vocab": [{"rank": i, "token_bytes": base64.b64encode(b).decode(), "token_str": None} for i, b in enumerate(ordered)], **({"special_tokens": special} if special else {})}).encode()
    with tempfile.TemporaryDirectory() as dir:
        with open(dir + "/tekken.json", "wb") as f:
            f.write(data)
        tok = Tekkenizer.from_file(dir + "/tekken.json")
    rows = [{"t": text, "s": ids, "d": tok.decode(ids)} for text in texts(150) for ids in [tok.encode(text, bos=True, eos=False)]]
    rows += [{"r": ids, "d": tok.decode(ids)} for ids in random_ids(60, tok.n_words)]
    put("tekken " + version, "tekken.json", data, rows)

here = os.path.dirname(os.path.abspath(__file__))


def write(name, value):
    with open(here + "/" + name, "wb") as f:
        f.write(gzip.compress(json.dumps(value, separators=(",", ":")).encode(), 9, mtime=0))


write("kinds.json.gz", kinds)

patterns = {}
for p in json.load(open(sys.argv[1])):
    s = split(p)
    patterns[p] = [[t, [x for x, _ in s.pre_tokenize_str(t)]] for t in texts(60)]
write("patterns.json.gz", patterns)

code_points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
text = "".join(map(chr, code_points))
kind = {}
for c in "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split():
    for _, (a, b) in split(r"\p{%s}+" % c, "removed", True).pre_tokenize_str(text):
        for x in code_points[a:b]:
            kind[x] = c
runs = []
for c in code_points:
    if not runs or runs[-1][1] != kind.get(c, ""):
        runs.append([c, kind.get(c, "")])
write("categories.json.gz", runs)
print({k["name"]: len(k["data"]) for k in kinds})
