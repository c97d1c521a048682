"""Operations on lists of names.

Copying, reversing, sorting and edits at a given index have one right answer, so nothing is lost if tokens are predicted
independently. A shuffle, or an edit at a random place, has many right answers, which independent tokens mix up.
"""

import dataclasses
import itertools
import re

from specjax.bench.parallel.base import Question, Task
from specjax.tasks.operations import OPERATIONS, Operation

FIRST = (
    "Ada",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Henry",
    "Irene",
    "Jamal",
    "Keiko",
    "Liam",
    "Mara",
    "Noah",
)
LAST = (
    "Adler",
    "Brooks",
    "Castro",
    "Dixon",
    "Evans",
    "Fischer",
    "Garcia",
    "Hughes",
    "Ivanov",
    "Jensen",
    "Khan",
    "Larsen",
)
EVERYBODY = tuple(f"{first} {last}" for first, last in itertools.product(FIRST, LAST))
ASKED = {
    "copy": "Nothing has changed: repeat the list.",
    "reverse": "The line turns around: the last is now in front.",
    "sort": "The line is put in alphabetical order.",
    "shuffle": "The line is shuffled into any other order.",
    "insert_index": "{word} joins the line at place{place}.",
    "insert_random": "{word} joins the line at any place.",
    "remove_index": "The person at place{place} leaves.",
    "remove_random": "Any one person leaves.",
    "replace_index": "{word} takes the place of the person at place{place}.",
    "replace_random": "{word} takes the place of any one person.",
}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a question of a list is about.

    Attributes:
      items: the given list.
      answer: a right answer, one of several if there are several.
      word: the name to insert or to substitute, or None.
      index: the place of an edit, from 0, or None.
    """

    items: tuple[str, ...]
    answer: tuple[str, ...]
    word: str | None
    index: int | None


class ListTask(Task):
    """An operation on a list of names, in the words of people who wait in line."""

    sizes = range(2, 51)
    usual = (3, 4, 5, 6)
    shows = True

    def __init__(self, name: str):
        self.name = name

    @property
    def operation(self) -> Operation:
        """The operation."""
        return OPERATIONS[self.name]

    def draw(self, rng, size):
        kind = self.operation
        *items, spare = (EVERYBODY[i] for i in rng.choice(len(EVERYBODY), size + 1, replace=False))
        word = spare if kind.word else None
        index = int(rng.integers(kind.places(size))) if kind.places else None
        given = Given(tuple(items), kind.solve(tuple(items), word, index, rng), word, index)
        asked = ASKED[self.name].format(word=word, place=f" {index}" if index is not None else "")
        text = (
            "These people wait in line at a service desk, the first in front, places counted from 0:\n"
            f"{render(given.items)}\n{asked} Answer with the new list and nothing else."
        )
        return Question(self.name, text, render(given.answer), given)

    def factors(self, question, text, tools):
        return {"right": float(self._right(question, read_answer(text)))}

    def strict(self, question, text):
        return self._right(question, read_answer(text, strict=True))

    def _right(self, question: Question, answer: tuple[str, ...] | None) -> bool:
        given = question.given
        return answer is not None and self.operation.right(answer, given.answer, given.items, given.word)


def render(items: tuple[str, ...]) -> str:
    """A list as it is written.

    >>> render(("Ada Khan", "Ben Dixon"))
    '["Ada Khan", "Ben Dixon"]'
    """
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def read_answer(text: str, strict: bool = False) -> tuple[str, ...] | None:
    """The list in an answer: the text between its last `[` and the next `]`, as ParallelBench reads it.

    Args:
      text: the model's text.
      strict: whether brackets, quotes and `, ` between items are required; if they are missing, the result is None.
        Otherwise items without quotes count, empty items are left out, and single quotes are a part of an item.

    >>> read_answer('the line: ["Ada Khan", Ben Dixon,]')
    ('Ada Khan', 'Ben Dixon')
    """
    start = text.rfind("[") + 1
    end = text.find("]", start)
    inner = text[start:] if end < 0 else text[start:end]
    if not strict:
        return tuple(item.strip('" ') for item in inner.split(",") if item.strip())
    items = inner.split(", ")
    if not start or end < 0 or not all(re.fullmatch(r'"[^"]*"', item) for item in items):
        return None
    return tuple(item[1:-1] for item in items)
