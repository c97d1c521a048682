"""OS3, the optimal speculation stride scheduler of RaLMSpec (arXiv:2401.14021, section 4): how many strides to write
before one retrieval checks them.
"""

import collections
import math
from collections.abc import Sequence


def round_seconds(ahead: int, write: float, check: float, match: float, *, overlap: bool = False) -> float:
    """The expected seconds of a round.

    Args:
      ahead: s, the strides that are written before a retrieval checks them.
      write: a, the seconds of a stride.
      check: b, the seconds of the retrieval.
      match: g, the probability that a guessed document is the retrieved one.
      overlap: whether the retrieval runs beside the next stride, which is kept if all guesses were right.
    """
    whole = ahead * write + check
    if not overlap:
        return whole
    right = match**ahead
    return right * ((ahead - 1) * write + max(write, check)) + (1 - right) * whole


def best_ahead(write: float, check: float, match: float, *, overlap: bool = False, most: int = 64) -> int:
    """The number of strides with the most verified strides in a second, the larger of two equal ones.

    A round verifies `(1 - g^s) / (1 - g)` strides on average. As published, s grows from 1 until the next larger one is
    worse.

    Args:
      write: a.
      check: b.
      match: g, below 1.
      overlap: see `round_seconds`.
      most: the largest answer.
    """
    seconds = lambda ahead: round_seconds(ahead, write, check, match, overlap=overlap)
    ahead = 1
    while ahead < most and (1 - match ** (ahead + 1)) * seconds(ahead) >= (1 - match**ahead) * seconds(ahead + 1):
        ahead += 1
    return ahead


def match_rate(guessed: Sequence[int], matched: Sequence[int], most: float = 0.6) -> float:
    """The estimate of g from rounds: right guesses, over right guesses and rounds with a wrong one.

    Args:
      guessed: the guesses of each round.
      matched: how many of each, up to the first wrong one, were right.
      most: the largest answer; with g = 1 no number of strides would be best.
    """
    right = sum(matched)
    missed = sum(own < all for own, all in zip(matched, guessed, strict=True))
    return min(right / (right + missed), most) if right + missed else most


class Pace:
    """How many strides to write ahead: a fixed number, or the scheduler's after each round.

    Args:
      ahead: the number, or `os3`.
      overlap: see `round_seconds`.
      window: of how many rounds guesses count.
      first: the scheduler's number before it knows anything.
    """

    def __init__(self, ahead: int | str, overlap: bool, window: int = 5, first: int = 3):
        self.fixed = isinstance(ahead, int)
        self.ahead = ahead if isinstance(ahead, int) else first
        self.overlap = overlap
        self.rounds: collections.deque[tuple[list[int], list[int]]] = collections.deque(maxlen=window)

    def heard(self, guessed: Sequence[int], matched: Sequence[int], write: float, check: float) -> None:
        """Takes note of a round: of each row the guesses and the right ones, and the seconds of a stride and the retrieval."""
        self.rounds.append((list(guessed), list(matched)))
        if not self.fixed and write > 0 and math.isfinite(check):
            every, right = ([one for own in self.rounds for one in own[side]] for side in (0, 1))
            rate = match_rate(every, right)
            self.ahead = best_ahead(write, check, rate, overlap=self.overlap)
