"""Operations on lists: ParallelBench's forms (Kang et al. 2025), and duplicates. Shuffles have many right answers."""

from specjax.about import About
from specjax.tasks.base import Family, Question
from specjax.tasks.operations import OPERATIONS
from specjax.tasks.words import ANIMALS, CITIES, COLORS, FRUITS, NAMES, THINGS

SIZES = {1: (4, 6), 2: (6, 10), 3: (12, 20)}
POOLS = {
    "names": NAMES,
    "cities and names": CITIES + NAMES,
    "animals and fruits": ANIMALS + FRUITS,
    "things": THINGS + COLORS,
    "numbers": tuple(str(n) for n in range(10, 100)),
}
ASKS = {
    "copy": ("Repeat the list.", "Copy the list.", "Write the same list again.", "Give the list as it is."),
    "reverse": ("Reverse the list.", "Write the list from back to front.", "Turn the list around."),
    "sort": ("Sort the list.", "Put the list in order, the smallest first.", "Write the list in ascending order."),
    "dedupe": ("Remove what stands there twice, keep the first.", "Write each item once, in the order of first sight."),
    "shuffle": ("Shuffle the list.", "Put the list in any other order.", "Mix the items in a new order."),
    "insert_index": (
        "Insert {word} at place {index}, counted from 0.",
        "Put {word} in so that {index} items are before it.",
    ),
    "insert_random": ("Insert {word} anywhere.", "Put {word} in at any place."),
    "remove_index": (
        "Remove the item at place {index}, counted from 0.",
        "Drop the item that has {index} items before it.",
    ),
    "remove_random": ("Remove any one item.", "Leave out one item of your choice."),
    "replace_index": ("Replace the item at place {index}, counted from 0, with {word}.",),
    "replace_random": ("Replace any one item with {word}.", "Put {word} in the place of some item."),
}
FRAMES = (
    "{asked}\n {items}",
    "{items}\n {asked}",
    "Here is a list: {items}\n {asked}",
    "{asked} The list is {items}",
    "List: {items}\n Task: {asked} Answer with the list and nothing else.",
    "Given {items} do this: {asked}",
)
SEPARATORS = {
    "brackets": ("[ ", ", ", " ]"),
    "commas": ("", ", ", ""),
    "arrows": ("", " > ", ""),
    "bars": ("| ", " | ", " |"),
}


class Lists(Family):
    """A list and an operation."""

    about = About(
        "lists", "copy, reverse, sort, dedupe, shuffle, insert, remove, replace", "ParallelBench, Kang et al. 2025"
    )
    asks = "copying"

    def draw(self, rng, level):
        low, high = SIZES[level]
        pool = POOLS[rng.choice(tuple(POOLS))]
        name = rng.choice(tuple(OPERATIONS))
        *items, word = rng.sample(pool, rng.integers(low, high + 1) + 1)
        if name == "dedupe":
            fresh = len(items) - len(items) // 3
            items = rng.shuffled([*items[:fresh], *rng.sample(items[:fresh], len(items) - fresh)])
        operation = OPERATIONS[name]
        index = rng.integers(operation.places(len(items))) if operation.places else None
        return name, tuple(items), word if operation.word else None, index

    def key(self, content):
        return " ".join(sorted(content[1]))

    def write(self, rng, level, content):
        name, items, word, index = content
        answer = OPERATIONS[name].solve(items, word, index, rng)
        style, frame = rng.choice(tuple(SEPARATORS)), rng.integers(len(FRAMES))
        asked = rng.choice(ASKS[name]).format(word=word, index=index)
        prompt = FRAMES[frame].format(asked=asked, items=written(items, style))
        answers = (written(answer, style),)
        return Question(
            self.name, level, prompt, answers, self.key(content), name, given=(name, items, word, style, answer)
        )

    def check(self, question, text):
        name, items, word, style, expected = question.given
        answer = read(text, style)
        return answer is not None and OPERATIONS[name].right(answer, expected, items, word)


def written(items: tuple[str, ...], style: str) -> str:
    """A list in a style of `SEPARATORS`.

    >>> written(("a", "b"), "brackets")
    '[ a, b ]'
    """
    before, between, after = SEPARATORS[style]
    return before + between.join(items) + after


def read(text: str, style: str) -> tuple[str, ...] | None:
    """The list in a text; None if it is not written in this style.

    >>> read(" [ a, b ]", "brackets")
    ('a', 'b')
    """
    before, between, after = (part.strip() for part in SEPARATORS[style])
    text = text.strip()
    if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
        return None
    items = tuple(item.strip() for item in text[len(before) : len(text) - len(after)].split(between))
    return items if all(item and len(item.split()) == 1 for item in items) else None
