"""The contract of a family of tasks: questions with a prompt, reference answers, an exact checker and a key to the
meaning.

A hash of its key decides whether a question is held out, so no seed, wording or level can move it to the other side.
Copied words follow a space in both prompt and answer, also in lists, quotes and JSON strings, so that a tokenizer gives
them the same token.
"""

import abc
import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

from specjax.about import About

Item = TypeVar("Item")
Asks = Literal["knowledge", "copying"]
LEVELS = (1, 2, 3)
HELD_OUT_PARTS = 16
"""One in this many meanings is held out."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      family: name of its family.
      level: 1 (easiest) to 3.
      prompt: the text of the question.
      answers: right answers; the first is used for training. If the checker accepts more than these, some of them.
      key: its meaning, whatever its wording.
      form: its wording, for statistics.
      infill: for models that fill in: if the answer is a gap in a text, the text before and after the gap.
      given: further data for the checker, as plain data.
    """

    family: str
    level: int
    prompt: str
    answers: tuple[str, ...]
    key: str
    form: str = ""
    infill: tuple[str, str] | None = None
    given: Any = None


class Rng:
    """A generator with the same draws on every platform and Python version.

    Only `random.Random.random` guarantees that, so all draws are made from it.

    Args:
      words: the words of which the seed is made.
    """

    def __init__(self, *words: Any):
        seed = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
        self._random = random.Random(int.from_bytes(seed[:8], "big")).random

    def integers(self, low: int, high: int | None = None) -> int:
        """A whole number in [`low`, `high`), or in [0, `low`) without `high`."""
        low, high = (0, low) if high is None else (low, high)
        return low + int(self._random() * (high - low))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[int(self._random() * len(items))]

    def permutation(self, n: int) -> list[int]:
        """The numbers below n in random order."""
        order = list(range(n))
        for i in range(n - 1, 0, -1):
            j = int(self._random() * (i + 1))
            order[i], order[j] = order[j], order[i]
        return order

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Some of the items, each at most once, in random order.

        Raises:
          ValueError: if there are fewer items than `count`.
        """
        if count > len(items):
            raise ValueError(f"cannot draw {count} of {len(items)} items")
        swapped: dict[int, int] = {}
        drawn = []
        for i in range(count):
            j = self.integers(i, len(items))
            drawn.append(items[swapped.get(j, j)])
            swapped[j] = swapped.get(i, i)
        return drawn

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The items in random order."""
        return [items[i] for i in self.permutation(len(items))]


class Family(abc.ABC):
    """A kind of task: it draws the content of a question (`draw`, `key`), then words it (`write`)."""

    about: ClassVar[About]
    split_as: ClassVar[str] = ""
    """The family that owns the meanings, if two families ask about the same; empty: this one."""
    asks: ClassVar[Asks]
    """Where the answer is: `copying` if in the prompt, whose words it repeats, chooses or reorders; `knowledge` if only in the
    weights, as the results of sums, the rules of a programming language or a dictionary."""

    @abc.abstractmethod
    def draw(self, rng: Rng, level: int) -> Any:
        """Draws the content of a question, as plain data."""

    @abc.abstractmethod
    def key(self, content: Any) -> str:
        """A key that is equal for contents with the same meaning."""

    @abc.abstractmethod
    def write(self, rng: Rng, level: int, content: Any) -> Question:
        """A question about the content, in some wording."""

    @abc.abstractmethod
    def check(self, question: Question, text: str) -> bool:
        """Whether a text answers the question; it never raises and takes a bounded time."""

    def constraint(self, question: Question) -> Any:
        """The form that a question asks for, as `specjax.Sampling.constraint` reads it; None if it asks for none."""
        return None

    def obeys(self, question: Question, text: str) -> bool | None:
        """Whether a text has the form that a question asks for, whatever it says; None if it asks for none."""
        return None

    @property
    def name(self) -> str:
        """Its name."""
        return self.about.name

    def is_held_out(self, content: Any) -> bool:
        """Whether a content belongs to the held-out part."""
        words = f"{self.split_as or self.name}\0{self.key(content)}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") % HELD_OUT_PARTS == 0


def words_of(text: str) -> str:
    """A text with single spaces, as the checkers of exact answers compare it.

    >>> words_of("  a  b\\n c ")
    'a b c'
    """
    return " ".join(text.split())


def same_words(question: Question, text: str) -> bool:
    """Whether a text is one of the answers, up to white space."""
    return words_of(text) in map(words_of, question.answers)
