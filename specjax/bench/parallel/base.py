"""The contract of ParallelBench's tasks: questions by seed, and scores that are products of factors."""

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

ATTEMPTS = 2_000
Tools = Mapping[str, Callable[..., float]]
"""Measures by name, as far as their packages are here; see `specjax.bench.parallel.measures`."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      task: the name of its task.
      text: the question in words.
      answer: a right answer, one of several if there are several; of a free text, a reference.
      given: what the checker needs besides.
      example: another question of the task, which is shown with its answer; None if none is.
    """

    task: str
    text: str
    answer: str
    given: Any = None
    example: "Question | None" = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The example, then the question, as chat messages."""
        shown = [] if self.example is None else [*self.example.messages, _said("assistant", self.example.answer)]
        return [*shown, _said("user", self.text)]


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Task(abc.ABC):
    """A kind of question.

    Attributes:
      name: its name in a line.
      sizes: the sizes n that a line may ask for; empty if there is no choice.
      usual: the sizes of its questions where a line names none, equally many of each, the smallest first.
      shows: whether an example is shown before each question.
      measured: the measures that its factors need.
    """

    name: str
    sizes: ClassVar[range] = range(0)
    usual: ClassVar[tuple[int, ...]] = (0,)
    shows: ClassVar[bool] = False
    measured: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator, size: int) -> Question:
        """A question of a size."""

    @abc.abstractmethod
    def factors(self, question: Question, text: str, tools: Tools) -> dict[str, float]:
        """The factors of a text's score, each from 0 to 1, without those whose measure is not in `tools`."""

    def strict(self, question: Question, text: str) -> bool | None:
        """Whether a text is right and also written exactly as asked; None for a task without such a form."""
        return None

    def score(self, question: Question, text: str, tools: Tools) -> float | None:
        """The product of all factors; None if one of them cannot be measured."""
        if any(name not in tools for name in self.measured):
            return None
        return math.prod(self.factors(question, text, tools).values())

    def questions(self, count: int, size: int | None = None) -> list[Question]:
        """Different questions, always the same; with `size`, all of that size.

        Raises:
          ValueError: if the task has no such size, or not so many questions.
        """
        if size is not None and size not in self.sizes:
            allowed = f"n must be {self.sizes.start} to {self.sizes.stop - 1}" if self.sizes else "it takes no n"
            raise ValueError(f"{self.name}: {allowed}, got n={size}")
        sizes = self.usual if size is None else (size,)
        rng = np.random.default_rng(int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 65535)
        found: dict[str, Question] = {}
        for i in range(count):
            for _ in range(ATTEMPTS):
                example = self.draw(rng, sizes[0]) if self.shows else None
                drawn = dataclasses.replace(self.draw(rng, sizes[i * len(sizes) // count]), example=example)
                if drawn.text not in found:
                    break
            else:
                raise ValueError(f"{self.name}: only about {len(found)} different questions; ask for fewer")
            found[drawn.text] = drawn
        return list(found.values())
