"""Stories in which facts are stated once and asked for much later.

A book is a list of paragraphs about a handful of characters: scenes from the plots of grammar.py, facts between
their sentences, and questions about facts that were stated before. Everything follows from the seed.

    python stories.py -seed 7              one book, to read
    python stories.py -cases FILE -model DIR    the held-out recall cases, as JSON

One key in sixteen, say (place, Mira, key), is held out: books for training never state a fact about it, so a recall
case can only be answered by reading it.
"""

import argparse
import itertools
import json
import random
import re
import zlib

import grammar as g

GENDERS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
PRONOUNS = {name: GENDERS["she"] for name in g.WOMEN} | {name: GENDERS["he"] for name in g.MEN}
NAMES = g.WOMEN + g.MEN
LEADS = ["Everybody knows that {s}", "It is well known that {s}", "Remember that {s}", "People say that {s}",
         "You should know that {s}", "It is true that {s}"]


def held_out(kind, name, key):
    """Whether a fact about this key is kept for the recall cases. (crc32: the same in every run.)"""
    return zlib.crc32(f"{kind} {name} {key}".encode()) % 16 == 0


def article(text):
    """a or an, by the letter that follows; the grammar has no word where the letter deceives."""
    return re.sub(r"\b([Aa]) (?=[aeio]|ugly)", r"\1n ", text)


def begin(text):
    """The text as a sentence begins: with a capital, inside of quotes too."""
    i = text[0] == '"'
    return text[:i] + text[i].upper() + text[i + 1:]


class Deck:
    """Deals the cards of a list in random order, all of them before any comes again."""

    def __init__(self, rng, cards):
        self.rng, self.cards, self.left = rng, cards, []

    def deal(self):
        if not self.left:
            self.left = list(self.cards)
            self.rng.shuffle(self.left)
        return self.left.pop()


class Scope(dict):
    """The slots of a scene; a slot that is not bound is expanded as a rule."""

    def __init__(self, rng, **people):
        self.rng = rng
        for slot, name in people.items():
            self.bind(slot, name, PRONOUNS[name])

    def bind(self, slot, name, pronouns):
        he, him, his = pronouns
        self.update({slot: name, slot + "_he": he, slot + "_him": him, slot + "_his": his,
                     slot + "_He": he.capitalize(), slot + "_His": his.capitalize()})

    def __missing__(self, slot):
        text = self.rng.choice(g.RULES[slot.lower()]).format_map(self)
        return begin(text) if slot[0].isupper() else text


class Fact:
    """One fact: its sentence (said once, in one of several ways), its question and its answer."""

    def __init__(self, rng, kind, name, key):
        how = g.FACTS[kind]
        slots = Scope(rng, n=name)
        slots["k"], slots["v"] = key, VALUES[kind](rng)
        self.name, self.about = name, {name, key}
        self.held_out = held_out(kind, name, key)
        # The plain form is the most frequent one: it is the one that the answer repeats.
        state = how["state"][0] if rng.random() < 0.4 else rng.choice(how["state"])
        self.sentence = article(state.format_map(slots))
        self.question = rng.choice(how["ask"]).format_map(slots)
        self.answer = article(how["state"][0].format_map(slots))

    def told(self, rng, speaker):
        """The sentence as it stands in a story: plain, after a few words, or spoken."""
        x = rng.random()
        if x < 0.7:
            return self.sentence
        inner = self.sentence
        if not inner.startswith(self.name) and inner.split()[0] not in PRONOUNS:
            inner = inner[0].lower() + inner[1:]
        if x < 0.93:
            return rng.choice(LEADS).format(s=inner)
        return f"\"Do not forget that {inner[:-1]},\" said {speaker}."


VALUES = {
    "place": lambda r: f"{r.choice(g.PREPOSITIONS)} the {r.choice(g.LOOKS)} {r.choice(g.HOLDERS)}",
    "home": lambda r: f"in the {r.choice(g.LOOKS)} {r.choice(g.HOUSES)} {r.choice(g.SPOTS)}",
    "work": lambda r: r.choice(g.JOBS),
    "pet": lambda r: r.choice(g.PETNAMES),
    "count": lambda r: r.choice(g.NUMBERS),
    "color": lambda r: r.choice(g.COLORS),
    "food": lambda r: r.choice(g.FOODS),
    "number": lambda r: str(r.randrange(10, 100)),
    "born": lambda r: r.choice(g.MONTHS),
    "gift": lambda r: f"a {r.choice(g.COLORS)} {r.choice(g.GIFTS)}",
    "visit": lambda r: r.choice(g.DAYS),
    "word": lambda r: r.choice(g.WORDS),
}
# Kinds with more keys come up more often, so that distractors (the same item of others, other items of the same
# person) are the rule.
WEIGHTS = {"place": 5, "home": 2, "work": 2, "pet": 3, "count": 4, "color": 2, "food": 2, "number": 2, "born": 2,
           "gift": 4, "visit": 4, "word": 2}


class Book:
    """A book in the making: parts are (text, fact, role), role "", "state" or "ask"; the texts joined are the book."""

    def __init__(self, rng, cases=False):
        self.rng, self.cases = rng, cases
        self.cast = rng.sample(NAMES, rng.randint(4, 9))
        self.plots = Deck(rng, g.PLOTS)
        self.asides = Deck(rng, g.ASIDES)
        self.closers = Deck(rng, g.CLOSERS)
        self.talks = Deck(rng, g.TALKS)
        self.forms = Deck(rng, g.RULES["free"])
        self.keys = set()      # facts that are stated
        self.open = []         # facts that are stated and not asked for, oldest first
        self.parts = []
        self.length = 0        # characters

    def add(self, text, fact=None, role=""):
        self.parts.append((text, fact, role))
        self.length += len(text)

    def new_fact(self):
        rng = self.rng
        # Held-out keys never occur in training; in recall cases they are the half that may be asked for.
        wanted = self.cases and rng.random() < 0.5
        for tries in itertools.count():
            kind = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
            name = rng.choice(self.cast)
            how = g.FACTS[kind]
            if how.get("people"):
                key = rng.choice([x for x in self.cast if x != name])
            else:
                key = rng.choice(how["keys"]) if "keys" in how else ""
            if (kind, name, key) in self.keys:
                continue
            if held_out(kind, name, key) != (wanted and tries < 200):  # a small cast may have no more of them
                continue
            self.keys.add((kind, name, key))
            return Fact(rng, kind, name, key)

    def paragraph(self, sentences, facts=0):
        """Writes a paragraph with facts between its sentences."""
        sentences = [(s, None, "") for s in sentences]
        for _ in range(facts):
            fact = self.new_fact()
            speaker = self.rng.choice([x for x in self.cast if x not in fact.about])
            # Not before a sentence that may begin with a pronoun: it would seem to speak of the fact.
            places = [0, len(sentences)] + [i for i, (text, _, _) in enumerate(sentences)
                                            if text.split()[0] in PRONOUNS or text[0] == '"']
            sentences.insert(self.rng.choice(places), (fact.told(self.rng, speaker), fact, "state"))
        for i, (text, fact, role) in enumerate(sentences):
            self.add((" " if i else "\n" if self.parts else "") + text, fact, role)
        self.open += [fact for _, fact, role in sentences if role]

    def scene(self, facts):
        """A paragraph: a plot, a talk, or neither."""
        rng = self.rng
        if rng.random() < 0.25:
            return self.wander(facts)
        a, b, c = rng.sample(self.cast, 3)
        scope = Scope(rng, a=a, b=b, c=c)
        scope["tool"], scope["ware"] = rng.choice(g.TOOLS), rng.choice(g.WARES)
        if rng.random() < 0.1:
            sentences = [line.format_map(scope) for line in self.talks.deal()]
        else:
            steps = [step.format_map(scope) for step in map(rng.choice, self.plots.deal()) if step]
            if rng.random() < 0.3:
                steps.insert(1, Scope.__missing__(scope, "Weather") + ".")
            sentences = []
            for step in steps:
                if rng.random() < 0.2 and step.split()[0] in PRONOUNS:
                    sentences.append(self.asides.deal())
                sentences.append(step)
            if rng.random() < 0.5:
                sentences.append(self.closers.deal().format_map(scope))
        self.paragraph(sentences, facts)

    def free(self, template, scope, used):
        """A sentence that says no word twice, and for a few tries none that its paragraph has used."""
        for tries in itertools.count():
            text = begin(article(template.format_map(scope)))
            words = re.findall(r"[a-z]+", text.replace(scope["s"], "").replace(scope["o"], "").lower())
            words = [w for w in words if w not in g.COMMON]
            if len(words) == len(set(words)) and text.count(scope["o"]) < 2 and (tries > 9 or used.isdisjoint(words)):
                used.update(words)
                return text

    def wander(self, facts):
        """A paragraph without a plot, of sentences that the grammar makes freely, about two of the cast or two heroes
        of a tale."""
        rng = self.rng
        scope, sentences, used = Scope(rng), [], set()
        if rng.random() < 0.25:
            (scope["one"], hero, he), (scope["two"], other, she) = rng.sample(g.HEROES, 2)
            pair = [(hero, GENDERS[he]), (other, GENDERS[she])]
            scope.bind("s", *pair[0])
            scope["o"] = "somebody"
            sentences += [self.free("{tale}", scope, used), self.free("{second}", scope, used)]
        else:
            pair = [(name, PRONOUNS[name]) for name in rng.sample(self.cast, 2)]
        last = None
        for _ in range(rng.randint(2, 8)):
            i = rng.random() < 0.35
            subject, other = pair[i], pair[not i]
            scope.bind("s", *subject)
            scope.bind("o", *other)
            # A pronoun when the sentence before had this subject and nobody else in it.
            alone = (last == i and other[0] not in sentences[-1]
                     and sentences[-1].startswith((begin(subject[0]), scope["s_He"])))
            scope["S"] = scope["s_He"] if alone and rng.random() < 0.7 else begin(subject[0])
            form = self.forms.deal()
            while not sentences and begin(form).replace("{S}", "").startswith(g.LATER):
                form = self.forms.deal()
            sentences.append(self.free(form, scope, used))
            last = i
        self.paragraph(sentences, facts)

    def ask(self, late):
        """Asks for a fact: any open one, or one of the oldest."""
        i = self.rng.randrange(min(4, len(self.open)) if late else len(self.open))
        fact = self.open.pop(i)
        if self.rng.random() < 0.75:
            self.add("\nQuestion: " + fact.question + "\nAnswer:")
            self.add(" " + fact.answer, fact, "ask")
        else:  # two others talk about it
            x, y = self.rng.sample([p for p in self.cast if p not in fact.about], 2)
            self.add(f"\n\"{fact.question}\" asked {x}. \"")
            self.add(fact.answer[:-1], fact, "ask")
            self.add(f",\" said {y}.")

    def write(self, length):
        """Fills the book up to about length characters. What kind of book it becomes is drawn first: a register of
        facts and then stories, or stories with few or many facts in them."""
        rng = self.rng
        kind = rng.random()
        per_scene, asks = (0.3, 0.3) if kind < 0.4 else (3, 3)
        if self.cases or kind > 0.7:
            register = rng.randint(14, 18) if self.cases else rng.randint(4, 30)
            while len(self.open) < register:
                if rng.random() < 0.4:
                    self.scene(rng.randint(1, 4))
                else:
                    self.paragraph([], rng.randint(2, 5))
            register = len(self.open)
            per_scene, asks = (1, 1) if self.cases else (rng.choice((0, 1, 3)), rng.choice((1, 2, 3)))
        while self.length < length:
            self.scene(rng.randint(0, int(2 * per_scene)) if per_scene >= 1 else int(rng.random() < per_scene))
            for _ in range(rng.randint(0, int(2 * asks)) if asks >= 1 else int(rng.random() < asks)):
                late = rng.random() < (0.8 if self.length > 0.75 * length else 0.25)
                # A recall case asks for the facts of the register itself, at the end: leave them open here.
                if self.open and not self.cases:
                    self.ask(late)
                elif self.cases and len(self.open) > register:
                    self.ask_after(register)
        if not self.cases:
            while self.open and rng.random() < 0.9:
                self.ask(late=True)
        return self

    def ask_after(self, first):
        early, self.open = self.open[:first], self.open[first:]
        self.ask(False)
        self.open = early + self.open

    def text(self):
        return "".join(text for text, _, _ in self.parts)


def book(seed, length):
    """One book for training, and the string that ends it."""
    return Book(random.Random(seed)).write(length).text() + "\nThe end."


# A token of the shipped vocabulary is about this many characters long; it only sets how long a book is made.
CHARACTERS = 4.05


def sequence(seed, tokens):
    """The books that fill a sequence of so many tokens: mostly one long one, else several short ones."""
    rng = random.Random(seed)
    size = tokens * CHARACTERS
    books, total = [], 0
    long = rng.random() < 0.8
    while total < 1.1 * size:
        length = rng.uniform(0.85, 1.1) * size if long else rng.uniform(0.1, 0.6) * size
        books.append(book(rng.getrandbits(62), int(length)))
        total += len(books[-1])
    return books


def cases(seed, encode, documents, each, tokens=2048, distance=1500):
    """Recall cases: documents with questions that are each to be put after the whole text. Every question asks for a
    fact about a held-out key, stated once, so many tokens before the question, and everything fits the positions."""
    rng = random.Random(seed)
    out = []
    while len(out) < documents:
        made = Book(rng, cases=True)
        made.write(int(1.2 * tokens * CHARACTERS))
        # Parts end where words end, so their tokens are those of the whole.
        n, text, ends = 1, "", {}  # the first position is </s>
        paragraph, size, stated = "", 0, {}
        for part, fact, role in made.parts:
            if part[0] == "\n":  # a paragraph is complete; the last ones are dropped, to leave room for a question
                if n + size > tokens - 50:
                    break
                text, n, ends = text + paragraph, n + size, ends | stated
                paragraph, size, stated = "", 0, {}
            paragraph, size = paragraph + part, size + len(encode(part))
            if role == "state":
                stated[fact] = n + size
        found = []
        for fact, end in ends.items():
            if fact not in made.open or not fact.held_out or n - end < distance:
                continue
            question = f"\nQuestion: {fact.question}\nAnswer:"
            if n + len(encode(question + " " + fact.answer)) > tokens:
                continue
            found.append({"question": question, "answer": " " + fact.answer, "distance": n - end})
        if len(found) >= each:
            out.append({"text": text, "tokens": n, "cases": rng.sample(found, each)})
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-seed", type=int, default=0)
    p.add_argument("-length", type=int, default=8000, help="characters of the book")
    p.add_argument("-cases", help="write recall cases to this file")
    p.add_argument("-documents", type=int, default=20)
    p.add_argument("-each", type=int, default=5, help="questions a document")
    p.add_argument("-model", help="folder with the vocabulary, for -cases")
    a = p.parse_args()
    if not a.cases:
        print(book(a.seed, a.length))
        return
    from vocab import load
    tokenizer = load(a.model)
    made = cases(a.seed, lambda s: tokenizer.encode(s).ids, a.documents, a.each)
    with open(a.cases, "w", encoding="utf-8", newline="\n") as f:
        json.dump(made, f, indent=0)
        f.write("\n")


if __name__ == "__main__":
    main()
