"""Retrieval of several needles or keyed values from contexts of 256 to 2,048 tokens."""

import re

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.words import ADJECTIVES, ANIMALS, CITIES, COLORS, FRUITS, NAMES, PLACES, THINGS

SIZES = {1: (260, 420, 2), 2: (420, 640, 3), 3: (1100, 1750, 5)}
"""By level: the fewest and most pieces (words, digits, marks) of the context, and the number of requested values."""
ENTRIES = {
    "code": "The secret code of the {k} is {v}.",
    "line": "The key {k} has the value {v}.",
    "phone": "For the {k} call the number {v}.",
    "box": "Box {v} holds the {k}.",
    "room": "You find the {k} in room {v}.",
    "price": "The price of the {k} is {v} coins.",
}
FILLER = (
    "The {adjective} {animal} sleeps in the {place}.",
    "{name} walks from the {place} to the market.",
    "The {thing} lies under the bridge.",
    "Nothing new happens in {city} this week.",
    "{name} eats the {fruit} and thinks of {city}.",
    "It is raining on the {place} again.",
)
TABLES = {
    "adjective": ADJECTIVES,
    "animal": ANIMALS,
    "place": PLACES,
    "name": NAMES,
    "thing": THINGS,
    "city": CITIES,
    "fruit": FRUITS,
}
KEYS = tuple(f"{color} {thing}" for color in COLORS for thing in THINGS)
ASKS = (
    "{context}\n What does the text say about {keys}? Repeat the sentences in this order.",
    "Some lines matter here. {context}\n Write the sentences about {keys}, in this order.",
    "Look for {keys} in this text, and copy their sentences in this order.\n {context}",
    "Remember what is said of {keys}.\n {context}\n Now write those sentences in the order asked.",
    "Text: {context}\n Task: find {keys} and give the sentence of each, in order.",
    "{context}\n Copy, in this order, the sentences about {keys}.",
)


class Retrieve(Family):
    """Needles in a text about other things, or a table of only such sentences."""

    about = About("retrieve", "needles and keyed values from 256 to 2,048 tokens", "-")
    asks = "copying"

    def draw(self, rng, level):
        kind, asked = rng.choice(tuple(ENTRIES)), SIZES[level][2]
        return kind, tuple((key, _value(rng)) for key in rng.sample(KEYS, asked))

    def key(self, content):
        return " ; ".join(sorted(" ".join(pair) for pair in content[1]))

    def write(self, rng, level, content):
        kind, asked = content
        low, high, _ = SIZES[level]
        size = rng.integers(low, high)
        sentence = ENTRIES[kind]
        wanted = [sentence.format(k=key, v=value) for key, value in asked]
        table = rng.chance(0.4)
        used = dict(asked)
        told, length = list(wanted), sum(map(pieces, wanted))
        while length < size:
            if not table and not rng.chance(0.1):
                line = _filler(rng)
            else:
                while (decoy := rng.choice(KEYS)) in used:
                    pass
                used[decoy] = _value(rng)
                line = sentence.format(k=decoy, v=used[decoy])
            told.append(line)
            length += pieces(line)
        form = rng.integers(len(ASKS))
        names = [key for key, _ in asked]
        prompt = ASKS[form].format(
            context=" ".join(rng.shuffled(told)), keys=f"{', '.join(names[:-1])} and {names[-1]}"
        )
        words = f"{'table' if table else 'needles'}-{kind}-{form}"
        return Question(self.name, level, prompt, (" ".join(wanted),), self.key(content), words)

    def check(self, question, text):
        return same_words(question, text)


def pieces(text: str) -> int:
    """The number of words, digits and marks of a text: about its tokens in a small vocabulary.

    >>> pieces("Box 4 1 2 belongs to Ada.")
    8
    """
    return len(re.findall(r"[0-9]|[^\W0-9]+|[^\w\s]", text))


def _value(rng) -> str:
    return " ".join(str(rng.integers(10)) for _ in range(4))


def _filler(rng) -> str:
    return re.sub("{([a-z]+)}", lambda slot: rng.choice(TABLES[slot[1]]), rng.choice(FILLER))
