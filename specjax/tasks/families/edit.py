"""Edits of a paragraph by instruction: long copies with changes."""

from specjax.about import About
from specjax.tasks.base import Family, Question, same_words
from specjax.tasks.words import ADJECTIVES, ANIMALS, COLORS, NAMES, PLACES, THINGS

SIZES = {1: (2, 4, 1), 2: (4, 6, 1), 3: (6, 9, 2)}
"""By level: the fewest and most sentences, and the number of edits."""
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth".split()
SENTENCES = (
    "The {adjective} {animal} sleeps near the {place}.",
    "{name} puts the {color} {thing} on the table.",
    "In the {place} we saw the {adjective} {animal}.",
    "{name} and {other} walk to the {place}.",
    "The {color} {thing} belongs to {name}.",
    "Nobody knows why the {animal} took the {thing}.",
    "{name} gives the {thing} to the {adjective} {animal}.",
    "The {place} is close to the old {next_place}.",
    "Every morning {name} looks for the {adjective} {animal}.",
    "There was a {thing} behind the {color} door of the {place}.",
)
EDITS = {
    "replace": (
        'Replace " {a}" with " {b}" everywhere.',
        'Change the word " {a}" to " {b}".',
        'Write " {b}" for " {a}".',
    ),
    "delete": ("Delete the {i} sentence.", "Leave out the {i} sentence.", "Drop sentence number {n}."),
    "swap": ("Swap the {i} and the {j} sentence.", "Let the {i} and {j} sentences change places."),
    "append": ('Add " {s}" at the end.', 'Put this last: " {s}"', 'End with " {s}"'),
    "prepend": ('Put " {s}" at the beginning.', 'Begin with " {s}"', 'Add this in front: " {s}"'),
    "after": ('Insert " {s}" after the {i} sentence.', 'Put " {s}" behind the {i} sentence.'),
    "move": ("Move the {i} sentence to the end.", "Put the {i} sentence last."),
}
ASKS = (
    "{edits}\n Text: {text}",
    "{text}\n {edits}",
    "Edit the text. {edits}\n {text}",
    "Here is a paragraph: {text}\n Now do this: {edits}",
    "Copy the paragraph with these changes. {edits}\n {text}",
    "{edits} Write the whole new text.\n {text}",
    "Paragraph: {text}\n Task: {edits} Give the new paragraph.",
)


class Edit(Family):
    """A paragraph and an edit; at level 3 two edits, the second applied to the result of the first."""

    about = About("edit", "a paragraph, edited as told: long copies", "-")
    asks = "copying"

    def draw(self, rng, level):
        low, high, edits = SIZES[level]
        forms = rng.sample(SENTENCES, min(rng.integers(low, high + 1), len(SENTENCES)))
        return tuple(_sentence(rng, form) for form in forms), edits

    def key(self, content):
        return " ".join(content[0])

    def write(self, rng, level, content):
        sentences, count = list(content[0]), content[1]
        told = []
        for kind in rng.sample(tuple(EDITS), count):
            words, sentences = edited(rng, kind, sentences)
            told.append(words)
        form = rng.integers(len(ASKS))
        steps = told if count == 1 else [f"{'First' if i == 0 else 'Then'}: {words}" for i, words in enumerate(told)]
        prompt = ASKS[form].format(edits=" ".join(steps), text=" ".join(content[0]))
        return Question(self.name, level, prompt, (" ".join(sentences),), self.key(content), f"ask {form}")

    def check(self, question, text):
        return same_words(question, text)


def _sentence(rng, form: str) -> str:
    name, other = rng.sample(NAMES, 2)
    place, following = rng.sample(PLACES, 2)
    filled = {"adjective": ADJECTIVES, "animal": ANIMALS, "color": COLORS, "thing": THINGS}
    words = {slot: rng.choice(table) for slot, table in filled.items()}
    return form.format(name=name, other=other, place=place, next_place=following, **words)


def edited(rng, kind: str, sentences: list[str]) -> tuple[str, list[str]]:
    """An edit in words, and the sentences after it."""
    i, j = sorted(rng.sample(range(len(sentences)), 2))
    extra = _sentence(rng, rng.choice(SENTENCES))
    a = b = ""
    if kind == "replace":
        a, b = _replacement(rng, sentences)
    words = rng.choice(EDITS[kind]).format(a=a, b=b, i=ORDINALS[i], j=ORDINALS[j], n=i + 1, s=extra)
    done = {
        "replace": lambda: [_replaced(sentence, a, b) for sentence in sentences],
        "delete": lambda: sentences[:i] + sentences[i + 1 :],
        "swap": lambda: [*sentences[:i], sentences[j], *sentences[i + 1 : j], sentences[i], *sentences[j + 1 :]],
        "append": lambda: [*sentences, extra],
        "prepend": lambda: [extra, *sentences],
        "after": lambda: [*sentences[: i + 1], extra, *sentences[i + 1 :]],
        "move": lambda: [*sentences[:i], *sentences[i + 1 :], sentences[i]],
    }
    return words, done[kind]()


def _replacement(rng, sentences: list[str]) -> tuple[str, str]:
    """A replaceable word of the text, and another word of its kind that is not in the text."""
    present = {word.rstrip(".") for sentence in sentences for word in sentence.split()}
    tables = [table for table in (NAMES, ANIMALS, COLORS, THINGS, PLACES) if present & set(table)]
    table = rng.choice(tables)
    found = [word for word in table if word in present]
    return rng.choice(found), rng.choice([word for word in table if word not in present])


def _replaced(sentence: str, a: str, b: str) -> str:
    words = (b + word[len(a) :] if word.rstrip(".") == a else word for word in sentence.split())
    return " ".join(words)
