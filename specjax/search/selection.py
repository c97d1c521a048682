"""The base of selections. A selection takes one of several completions of a prompt, on the host, after all were drawn."""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specjax.about import Named
from specjax.models.messages import content_text


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A completion.

    Attributes:
      answer: its answer, in a form that can be compared. None if it has none: then it has no vote.
      certainty: its self-certainty, in nats (`specjax.state.LogProbs`); None if it was not kept.
      length: its tokens.
      ended: whether it ended by itself, with EOS or a stop string.
      text: all of it.
      prompt: what it completes; of a chat, the texts of its messages with an empty line between them.
    """

    answer: str | None
    certainty: float | None = None
    length: int = 0
    ended: bool = False
    text: str = ""
    prompt: str = ""


@dataclasses.dataclass(frozen=True)
class Selection(abc.ABC):
    """Values several completions; the best one is taken. Implementations are frozen dataclasses.

    Attributes:
      answer: a regular expression whose last match (its first group, if it has one) is a completion's answer; empty for
        all of the text.
      reads_certainty: whether completions need their self-certainty.
      stops_others: whether the shortest completion that ends is taken, so that the others are written no further than
        that.
      reads_text: whether it reads prompts and completions as texts.
    """

    about: ClassVar[Named] = None
    """Its names in the registry, and what its text guarantees compared with plain decoding's."""
    reads_certainty: ClassVar[bool] = False
    stops_others: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False

    _: dataclasses.KW_ONLY
    answer: str = ""

    def __post_init__(self):
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(f"answer must be a regular expression, got {self.answer!r}: {error}") from error

    def ready(self) -> "Selection":
        """Itself, with all that it needs; called before a model is loaded.

        Raises:
          ValueError: if something is not there.
        """
        return self

    @abc.abstractmethod
    def scores(self, candidates: Sequence[Candidate]) -> list[float]:
        """The score of each; -inf for a completion that must not be taken."""

    def choose(self, candidates: Sequence[Candidate]) -> tuple[int, float | None]:
        """The index and value of the best one, on a tie the first. If none has an answer, the first one without a value."""
        scores = self.scores(candidates)
        best = max(range(len(scores)), key=lambda index: (scores[index], -index))
        return (0, None) if scores[best] == -math.inf else (best, scores[best])


def by_answer(candidates: Sequence[Candidate], votes: Sequence[float]) -> list[float]:
    """The sum of the votes for each completion's answer; -inf without an answer."""
    sums: dict[str, float] = {}
    for candidate, vote in zip(candidates, votes, strict=True):
        if candidate.answer is not None:
            sums[candidate.answer] = sums.get(candidate.answer, 0.0) + vote
    return [-math.inf if candidate.answer is None else sums[candidate.answer] for candidate in candidates]


def certainties(candidates: Sequence[Candidate]) -> list[float]:
    """The self-certainty of each.

    Raises:
      ValueError: if one has none.
    """
    found = [candidate.certainty for candidate in candidates if candidate.certainty is not None]
    if len(found) < len(candidates):
        raise ValueError("these completions have no self-certainty: decode them with logprobs=True")
    return found


def answer_of(text: str, pattern: str | None = None) -> str | None:
    """The answer in a text: all of it with single spaces, or the last match of a regular expression.

    Args:
      text: the completion.
      pattern: a regular expression; its first group, if it has one, is the answer.

    >>> answer_of("So 3 + 4 = 7. The answer is 7.", r"answer is ([0-9]+)"), answer_of(" a  b ")
    ('7', 'a b')
    """
    if pattern is not None:
        found = list(re.finditer(pattern, text))
        if not found:
            return None
        text = found[-1][1 if found[-1].re.groups else 0] or ""
    return " ".join(text.split()) or None


def prompt_text(prompt: Any) -> str:
    """A prompt as a text, see `Candidate.prompt`; empty for ids."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if isinstance(message, Mapping)]
    return "\n\n".join(content_text(message) or "" for message in messages)
