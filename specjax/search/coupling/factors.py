"""What is believed of a message while its text is read, byte by byte (FIMEC, arXiv:2405.19540, Algorithm 2).

In the shape descriptions `U` denotes the tokens that are possible next, `F` the values of a factor, 256 for a byte.
"""

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np

from specjax.search.coupling.greedy import cells

Choice = Callable[[np.ndarray, np.ndarray], int | None]
"""From tokens `[U]` and their weights `[U]` to the index of one; None if it is not among them."""


class Factors:
    """Independent distributions, one for each part of a message; evenly distributed at first.

    Args:
      sizes: how many values each part has.
      merge: whether a token is drawn in rounds, as by default in the authors' program. Tokens that tell the same about a
        part are a group, and another part is coupled with the tokens of the group. Otherwise one part is coupled for each
        token.
    """

    def __init__(self, sizes: Sequence[int], merge: bool = True):
        self.beliefs = [np.full(size, 1 / size) for size in sizes]
        self.doubts = [_nats(own) for own in self.beliefs]
        self.merge = merge

    def copy(self) -> "Factors":
        """The same beliefs, for two ways to go on."""
        made = copy.copy(self)
        made.beliefs, made.doubts = list(self.beliefs), list(self.doubts)
        return made

    @property
    def likeliest(self) -> list[int]:
        """The likeliest value of every part."""
        return [int(own.argmax()) for own in self.beliefs]

    def log_prob(self, values: Sequence[int]) -> float:
        """The natural logarithm of the probability of a whole message."""
        chances = [float(own[value]) for own, value in zip(self.beliefs, values, strict=True)]
        return math.fsum(math.log(chance) if chance > 0 else -math.inf for chance in chances)

    def step(
        self, tokens: np.ndarray, masses: np.ndarray, choose: Choice, values: Sequence[int] | None = None
    ) -> int | None:
        """Goes on by a token, and learns from it.

        The part of which least is known is coupled with the tokens by the greedy coupling. Who knows the message draws
        among the tokens that meet its value; over evenly distributed messages the token then has its own distribution.

        Args:
          tokens: `[U]`, the ids of the possible tokens, in order.
          masses: `[U]` float64, their probabilities.
          choose: how a token is chosen.
          values: the message, if it is known.

        Returns:
          The token, or None if `choose` finds none.
        """
        while True:
            part = int(np.argmax(self.doubts))
            if (self.beliefs[part] == 1).any():
                at = choose(tokens, masses)
                return None if at is None else int(tokens[at])
            places, met = cells(masses, self.beliefs[part])
            weights = masses
            if values is not None:
                own = places[:, 1] == values[part]
                met_by = np.bincount(places[own, 0], met[own], len(tokens))
                # a value that hardly anything spoke for may have lost its mass to rounding
                weights = met_by / met_by.sum() if met_by.sum() > 0 else masses
            at = choose(tokens, weights)
            if at is None:
                return None
            group = _alike(places, met, at) if self.merge else np.asarray([at])
            self._learn(part, places, met, at)
            if len(group) <= 1:
                return int(tokens[at])
            tokens, masses = tokens[group], masses[group] / masses[group].sum()

    def _learn(self, part, places, met, at):
        """The part's distribution given a token."""
        own = places[:, 0] == at
        if met[own].sum() > 0:
            belief = np.zeros_like(self.beliefs[part])
            belief[places[own, 1]] = met[own] / met[own].sum()
            self.beliefs[part], self.doubts[part] = belief, _nats(belief)


def _nats(belief: np.ndarray) -> float:
    kept = belief[belief > 0]
    return float(-(kept * np.log(kept)).sum())


def _alike(places: np.ndarray, met: np.ndarray, at: int) -> np.ndarray:
    """The tokens after which the part's distribution is that after the token `at`, in order."""
    order = np.lexsort((places[:, 1], places[:, 0]))
    places, met = places[order], met[order]
    starts = np.flatnonzero(np.diff(places[:, 0], prepend=-1))
    counts = np.diff(starts, append=len(places))
    mine = int(np.searchsorted(places[starts, 0], at))
    if mine == len(starts) or places[starts[mine], 0] != at:
        return np.asarray([at])
    rows = starts[counts == counts[mine]]
    columns = rows[:, None] + np.arange(counts[mine])[None]
    own = starts[mine] + np.arange(counts[mine])
    shares = met[columns] / met[columns].sum(axis=1, keepdims=True)
    same = (places[columns, 1] == places[own, 1]).all(axis=1)
    return places[rows[same & np.isclose(shares, met[own] / met[own].sum()).all(axis=1)], 0]
