"""The byte-level BPE of the stories, with the special tokens where OPT has them.

    python vocab.py -o DIR

OPT's tokens are GPT-2's, but for the ids: <s> 0, <pad> 1, </s> 2, <unk> 3, and </s> stands before every text.
"""

import argparse
import json
import os

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import stories

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def train(size, texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    return tokenizer


def save(tokenizer, folder):
    """Writes the files of an OPT folder; vocab.json in the order of the ids."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.model.save(folder)
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False,
              "errors": "replace", **special}
    for name, content in (("special_tokens_map.json", special), ("tokenizer_config.json", config)):
        with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
            json.dump(content, f, indent=2)
            f.write("\n")


def load(folder):
    tokenizer = Tokenizer(models.BPE.from_file(os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-size", type=int, default=2048)
    p.add_argument("-books", type=int, default=2000)
    p.add_argument("-o", required=True, metavar="DIR")
    a = p.parse_args()
    # Seeds of their own: the sequences of the training have the seeds from 0 up.
    tokenizer = train(a.size, (stories.book(10**9 + i, 8000) for i in range(a.books)))
    save(tokenizer, a.o)


if __name__ == "__main__":
    main()
