"""The contract of a family of tasks: a question has a prompt, reference answers, an exact checker, and a key to its meaning.

A question is held out or for training by a hash of its key, so no seed, wording or level can move it to the other side. Copied
words have a space in front on both sides, in lists, quotes and JSON strings too, so that a tokenizer gives them one token.
"""

import abc
import dataclasses
import hashlib
import random
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from specjax.about import About

Item = TypeVar("Item")
LEVELS = (1, 2, 3)
HELD_OUT_PARTS = 16
"""One meaning in so many is held out."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      family: name of its family.
      level: 1 (easiest) to 3.
      prompt: what is asked.
      answers: right answers, the first the one to train on; where a checker accepts more than these, some of them.
      key: what it is about, whatever its wording.
      form: its wording, for statistics.
      infill: where the answer is a gap in a text, what stands before and after the gap, for models that fill in.
      given: what the checker needs besides the answers, plain data.
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
    """Draws that are the same on every platform and Python version: only `random.Random.random` promises that.

    Args:
      words: what the seed is made of.
    """

    def __init__(self, *words: Any):
        seed = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
        self._random = random.Random(int.from_bytes(seed[:8], "big")).random

    def integers(self, low: int, high: int | None = None) -> int:
        """A whole number from `low` to before `high`; from 0 to before `low` where there is no `high`."""
        low, high = (0, low) if high is None else (low, high)
        return low + int(self._random() * (high - low))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[int(self._random() * len(items))]

    def permutation(self, n: int) -> list[int]:
        """The numbers below n in any order."""
        order = list(range(n))
        for i in range(n - 1, 0, -1):
            j = int(self._random() * (i + 1))
            order[i], order[j] = order[j], order[i]
        return order

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Some of the items, each at most once, in any order.

        Raises:
          ValueError: where there are fewer.
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
        """The items in any order."""
        return [items[i] for i in self.permutation(len(items))]


class Family(abc.ABC):
    """A kind of task: first what a question is about (`draw`, `key`), then its words (`write`)."""

    about: ClassVar[About]
    split_as: ClassVar[str] = ""
    """The family whose meanings these are, where two families ask about the same; empty: its own."""

    @abc.abstractmethod
    def draw(self, rng: Rng, level: int) -> Any:
        """What a question is about, as plain data."""

    @abc.abstractmethod
    def key(self, content: Any) -> str:
        """The same words for the same meaning."""

    @abc.abstractmethod
    def write(self, rng: Rng, level: int, content: Any) -> Question:
        """A question about it, in some wording."""

    @abc.abstractmethod
    def check(self, question: Question, text: str) -> bool:
        """Whether a text answers the question; it never raises and takes a bounded time."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.about.name

    def is_held_out(self, content: Any) -> bool:
        """Whether what a question is about belongs to the held-out part."""
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
