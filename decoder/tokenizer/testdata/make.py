"""Makes split.json and utf8.json: what Python makes of the texts below.

split.json  [[text, [word, ...]], ...] by GPT-2's pattern and the regex module
utf8.json   [[bytes as hex, text], ...] by bytes.decode("utf-8", "replace")

    pip install regex==2026.11.15
    python make.py
"""

import itertools
import json
import random

import regex

pattern = regex.compile(
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)
rng = random.Random(1)

spaces = [chr(c) for c in range(0x110000) if regex.match(r"\s", chr(c))]
almost = ["\x1c", "\x1f", "\u180e", "\u200b", "\u2060", "\ufeff"]  # not white space, though some think so
pieces = spaces + almost + [
    " ", " ", " ", "\n", "a", "Zz", "é", "e\u0301", "ß", "日本", "ㅎ", "ª", "ǅ", "ʰ", "1", "42", "½", "Ⅷ", "٣", "²", "一",
    "'", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "''", "'l", "'r", "!", "...", "_", "-", "€", "👩\u200d👧", "\U000e0001",
]
texts = [
    "", " ", "  ", "a", " a", "  a", "a ", "a  ", "\n", "\n\n", "\na", "\n\na", " \n a", "a\n b", "'", "'s", " 's", "x's", "'sup",
    "I'll've don't HE'S", "a1b2", "1.5", "$5,000.00", "hello, world!  ", "\t\tif x:\n        return  1\n", "\u3000\u3000\u65e5\u672c",
]
texts += [a + s + b for s in spaces + almost for a, b in [("", ""), ("a", "b"), (" ", "b"), ("a", " "), ("\n", "1")]]
texts += ["".join(rng.choices(pieces, k=rng.randint(1, 24))) for _ in range(400)]

parts = [b"A", b"\x80", b"\xbf", b"\xc0", b"\xc3", b"\xc3\xa9", b"\xe0\x80", b"\xe6", b"\xe6\x97", b"\xe6\x97\xa5", b"\xed\xa0\x80",
         b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xf0\x9f\x91\xa9", b"\xf4\x90", b"\xf5", b"\xff"]
raw = [a + b for a, b in itertools.product(parts, parts)] + [b"".join(rng.choices(parts, k=6)) for _ in range(100)]


def write(name, rows):
    with open(name, "w", encoding="ascii") as f:
        f.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


write("split.json", [[t, pattern.findall(t)] for t in texts])
write("utf8.json", [[b.hex(), b.decode("utf-8", "replace")] for b in raw])
