"""ParallelBench's list tasks: how much a text suffers when its tokens are decoded in parallel (Kang et al. 2025).

Copying, reversing, sorting and edits at a given index have one right answer, so nothing is lost if tokens are predicted
independently. A shuffle, or an edit at a random place, has many right answers, which independent tokens mix up.
"""

import dataclasses
import hashlib
import itertools
import re

import numpy as np

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
LENGTHS, SAMPLES = (3, 4, 5, 6), 100


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
      task: its name.
      items: the given list.
      answer: a right answer, one of several if there are several.
      word: the name to insert or to substitute, or None.
      index: the place of an edit, from 0, or None.
      example: another question of the task, which is shown with its answer; None in an example.
    """

    task: str
    items: tuple[str, ...]
    answer: tuple[str, ...]
    word: str | None = None
    index: int | None = None
    example: "Sample | None" = None

    @property
    def question(self) -> str:
        """The question in words."""
        place = f" {self.index}" if self.index is not None else ""
        asked = TASKS[self.task].asked.format(word=self.word, place=place)
        return (
            "These people wait in line at a service desk, the first in front, places counted from 0:\n"
            f"{render(self.items)}\n{asked} Answer with the new list and nothing else."
        )

    @property
    def messages(self) -> list[dict[str, str]]:
        """The example, then the question, as chat messages."""
        shown = (
            [] if self.example is None else [*self.example.messages, _said("assistant", render(self.example.answer))]
        )
        return [*shown, _said("user", self.question)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
      asked: the operation in words, with `{word}` and `{place}`.
      operation: the operation on the list.
    """

    asked: str
    operation: Operation


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
TASKS = {name: Task(asked, OPERATIONS[name]) for name, asked in ASKED.items()}


def render(items: tuple[str, ...]) -> str:
    """A list as it is written.

    >>> render(("Ada Khan", "Ben Dixon"))
    '["Ada Khan", "Ben Dixon"]'
    """
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def seed_of(task: str) -> int:
    """The seed of a task, from its name."""
    return int(hashlib.sha256(task.encode()).hexdigest(), 16) % 65535


def samples(task: str, count: int = SAMPLES, lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    """The questions of a task, equally many of each length; always the same.

    Raises:
      ValueError: on an unknown task.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose {', '.join(TASKS)}")
    rng = np.random.default_rng(seed_of(task))
    names = [f"{first} {last}" for first, last in itertools.product(FIRST, LAST)]

    def draw(length, example):
        kind = TASKS[task].operation
        *items, spare = (names[i] for i in rng.choice(len(names), length + 1, replace=False))
        word = spare if kind.word else None
        index = int(rng.integers(kind.places(length))) if kind.places else None
        return Sample(task, tuple(items), kind.solve(tuple(items), word, index, rng), word, index, example)

    return [draw(lengths[i * len(lengths) // count], draw(lengths[0], None)) for i in range(count)]


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


def right(sample: Sample, text: str, strict: bool = False) -> bool:
    """Whether a text answers the question."""
    answer = read_answer(text, strict)
    operation = TASKS[sample.task].operation
    return answer is not None and operation.right(answer, sample.answer, sample.items, sample.word)
