"""Makes folders.json and classes.json: what transformers and tokenizers make of the
folders and texts below.

folders.json   {"vocab": ..., "merges": ..., "folders": [{"name", "files", "rows"}]}
               where a row is [text, ids, ids with split_special_tokens]. In a
               folder's tokenizer.json a model without vocab and merges has those
               above; vocab.json and merges.txt are those above where they are null.
classes.json   [[first code point, kind], ...]: kinds of characters up to the next
               row, letters of: L, N and S (letter, number and white space for
               ByteLevel), D (Digits), P (Punctuation), W (word character beside a
               single_word token)

    pip install transformers==5.24.0 tokenizers==0.23.3
    python folders.py
"""

import json
import os
import random
import tempfile

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

rng = random.Random(38)

# The vocabulary: OPT's special tokens, the bytes, and merges.
chars, nxt = [], 0x100
for b in range(256):
    chars.append(chr(b))
    if b < 33 or 126 < b < 161 or b == 173:
        chars[b], nxt = chr(nxt), nxt + 1
vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
for c in chars:
    vocab[c] = len(vocab)
merges, tokens = [], ["a", "b", "c", "s", "'", "1", "2", "<", "!", ".", chars[32], chars[10], chars[0xC3], chars[0xA9], chars[0xE6], chars[0x97]]
while len(merges) < 40:
    l, r = rng.choice(tokens), rng.choice(tokens)
    if l + r not in vocab and len(l + r) < 8:
        vocab[l + r] = len(vocab)
        merges.append([l, r])
        tokens.append(l + r)

spaces = [" ", " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\u200b", "\u180e", "\ufeff"]
pieces = spaces + """a b c ab abc aab st 's 't 'll 're 'S ’s 1 12 ² ½ ٣ é 日本 日 ㅎ ǅ ª _ - ! ... $ < </ s> <s> </s> <pad> <unk> <mask>
<|endoftext|> Ġ Ċ İ ß ſ Ⓐ 𞤀 ab1c, SPLIT""".split() + ["e\u0301", "👩\u200d👧", "👍🏽", "\u200d", "\x00", "\x7f", "\ufffd", "\U000e0001", "\u0897", "\U0001e5f1", "\U00010d40"]
added = ["<new>", "<new", "new>", "ab", "a b", " ab", "b\n", "é", "日", "Ġab", "[X]", "[X]]", "[[X]", "aa", "aaa", "__", "1", "</s>x", "'s", "foo bar",
         "\u0301", "  ", "<t1>", "<t10>", "<t>", "Ⓐx"]


def flags(special):
    return {k: rng.random() < 0.3 for k in ("single_word", "lstrip", "rstrip", "normalized")} | {"special": special}


def some():
    """Added tokens with their ids."""
    rows, at = [], len(vocab)
    for content in ["<pad>", "</s>"] + rng.sample(added, rng.randint(2, 9)):
        special = content in ("<pad>", "</s>") or rng.random() < 0.4
        id = vocab.get(content, at)
        at += id == at
        rows.append({"id": id, "content": content} | flags(special))
    return sorted(rows, key=lambda t: t["id"])


opt = dict(tokenizer_class="GPT2Tokenizer", add_bos_token=True, add_prefix_space=False, errors="replace",
           bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>")
fast = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>")
pair = {"vocab.json": None, "merges.txt": None}
published = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
template = dict(type="TemplateProcessing", single=[{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                pair=[{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                special_tokens={"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}})
around = dict(template, single=[{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
              special_tokens=template["special_tokens"] | {"x": {"id": "x", "ids": [0, 1], "tokens": ["<s>", "<pad>"]}})


def file(tokens=(), pre=byte_level, post=template, **model):
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False,
                 byte_fallback=False, ignore_merges=False) | model
    return dict(version="1.0", truncation=None, padding=None, added_tokens=list(tokens), normalizer=None, pre_tokenizer=pre,
                post_processor=post, decoder=byte_level, model=model)


def by_id(tokens):
    return {str(t["id"]): {k: x for k, x in t.items() if k != "id"} for t in tokens}


def sequence(*parts):
    return dict(type="Sequence", pretokenizers=list(parts))


def split(behavior):
    return dict(type="Split", pattern={"String": "SPLIT"}, behavior=behavior, invert=False)


def digits(individual):
    return dict(type="Digits", individual_digits=individual)


def punctuation(behavior):
    return dict(type="Punctuation", behavior=behavior)


folders = {
    "as published": pair | {"tokenizer_config.json": opt | dict.fromkeys(["bos_token", "eos_token", "unk_token"], published)
                            | {"pad_token": dict(published, content="<pad>"), "name_or_path": "x", "special_tokens_map_file": None}},
    "no bos": pair | {"tokenizer_config.json": dict(opt, add_bos_token=False)},
    "bos not said": pair | {"tokenizer_config.json": {k: x for k, x in opt.items() if k != "add_bos_token"}},
    "nothing said": pair | {"tokenizer_config.json": {}},
    "prefix space": pair | {"tokenizer_config.json": dict(opt, add_prefix_space=True)},
    "no special splitting": pair | {"tokenizer_config.json": dict(opt, split_special_tokens=True)},
    "added_tokens.json": pair | {"tokenizer_config.json": opt | {"additional_special_tokens": ["<t1>"]}, "added_tokens.json":
                                 {c: len(vocab) + i for i, c in enumerate(["<new>", "<t1>", "<t>", "foo bar", "aa"])}},
    "special_tokens_map.json": pair | {"tokenizer_config.json": opt, "special_tokens_map.json": {"mask_token": "[X]", "pad_token": {"content": "<t1>", "lstrip": True,
                                       "rstrip": True, "normalized": False, "single_word": False}, "additional_special_tokens": ["<t10>", "  "]}},
    "saved by 5": {"tokenizer.json": file([{"id": 1, "content": "<pad>"} | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False) | {"special": True},
                                           {"id": 2, "content": "</s>"} | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False) | {"special": True}]),
                   "tokenizer_config.json": {k: x for k, x in opt.items() if k != "add_bos_token"} | {"backend": "tokenizers", "is_local": True, "model_max_length": 10**30}},
    "template rules": {"tokenizer.json": file(some(), post=None), "tokenizer_config.json": opt},
    "template around": {"tokenizer.json": file(some(), post=dict(type="Sequence", processors=[byte_level, around])), "tokenizer_config.json": dict(opt, add_prefix_space=True)},
}
for i in range(4):
    t = some()
    folders[f"decoder {i}"] = pair | {"tokenizer_config.json": dict(opt, add_prefix_space=i % 2 == 1, added_tokens_decoder=by_id(t))}
    t = some()
    folders[f"both {i}"] = {"tokenizer.json": file(t), "tokenizer_config.json": opt | {"added_tokens_decoder": by_id(t)}}
    folders[f"json {i}"] = {"tokenizer.json": file(some()), "tokenizer_config.json": fast}
for i, pre in enumerate([sequence(split("Removed"), digits(True), punctuation("Isolated"), byte_level), sequence(digits(False), byte_level),
                         sequence(split("Isolated"), punctuation("Contiguous"), dict(byte_level, add_prefix_space=True)),
                         sequence(split("Contiguous"), punctuation("Removed"), digits(True), dict(byte_level, use_regex=False)), dict(byte_level, use_regex=False)]):
    folders[f"Galactica's kind {i}"] = {"tokenizer.json": file(some(), pre=pre, post=None, ignore_merges=i % 2 == 1),
                                        "tokenizer_config.json": fast | ({"add_prefix_space": True} if i == 2 else {})}
for i in range(2):
    # Without the bytes that no merge needs, but for some.
    held = {c for l, r in merges for c in l + r}
    less = [t for t in vocab if len(t) > 1 or t in held or rng.random() < 0.5]
    less = {t: i for i, t in enumerate(less)}
    folders[f"bytes lacking {i}"] = {"tokenizer.json": file(unk_token="<unk>", fuse_unk=i == 1, vocab=less, merges=[" ".join(m) for m in merges]), "tokenizer_config.json": fast}

rows = []
for name, contents in folders.items():
    with tempfile.TemporaryDirectory() as dir:
        for file_name, content in (contents | {"config.json": {"model_type": "opt"}}).items():
            with open(os.path.join(dir, file_name), "w") as f:
                if file_name == "merges.txt":
                    f.write("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in merges))
                elif file_name == "tokenizer.json":
                    json.dump(dict(content, model={"vocab": vocab, "merges": merges} | content["model"]), f)
                else:
                    json.dump(vocab if content is None else content, f)
        tokenizer = AutoTokenizer.from_pretrained(dir)
        spelled = AutoTokenizer.from_pretrained(dir, split_special_tokens=True)
        here = [t for t in added if t in tokenizer.get_vocab()]
        texts = ["", " ", "ab", " ab </s>ab", "</s>"] + ["".join(rng.choices(pieces + 3 * here, k=rng.randint(1, 12))) for _ in range(20)]
        rows.append({"name": name, "files": contents, "rows": [[t, tokenizer(t).input_ids, spelled(t).input_ids] for t in texts]})

with open("folders.json", "w", encoding="ascii") as f:
    f.write('{"vocab": %s,\n"merges": %s,\n"folders": [\n' % (json.dumps(vocab), json.dumps(merges)))
    f.write(",\n".join('{"name": %s, "files": %s, "rows": [\n%s]}' % (json.dumps(r["name"]), json.dumps(r["files"]), ",\n".join(map(json.dumps, r["rows"]))) for r in rows))
    f.write("\n]}\n")

level, number, punct = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(), pre_tokenizers.Punctuation()
word = Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
word.add_tokens([AddedToken("<w>", single_word=True)])
runs = []
for c in range(0x110000):
    if 0xD800 <= c < 0xE000:
        continue
    x, kind = chr(c), ""
    together = [k for k, other in (("L", "a"), ("N", "1"), ("", "!")) if len(level.pre_tokenize_str(other + x)) == 1]
    kind += together[0] if together else "S"
    kind += "D" * (len(number.pre_tokenize_str("a" + x)) == 2)
    kind += "P" * (len(punct.pre_tokenize_str("a" + x)) == 2)
    kind += "W" * (1 not in word.encode("<w>" + x).ids)
    if not runs or runs[-1][1] != kind:
        runs.append([c, kind])
with open("classes.json", "w") as f:
    f.write("[" + ", ".join(map(json.dumps, runs)) + "]\n")
