"""Borda voting (Kang et al. 2025): votes for answers that weigh the more, the surer the model was of the completion."""

import dataclasses

from specjax.about import About
from specjax.search.selection import Selection, by_answer, certainties


@dataclasses.dataclass(frozen=True)
class Borda(Selection):
    """Of N completions the r-th by self-certainty has `(N - r + 1) ** power` votes for its answer.

    Those without an answer are the last and have no vote. The surest one with the winning answer is taken.

    Attributes:
      power: 0 is a majority vote.
    """

    about = About("borda", "the answer of most completions, the surer ones first", "arXiv:2502.18581", "own text")
    reads_certainty = True

    power: float = 0.5

    def __post_init__(self):
        if not 0 <= self.power < float("inf"):
            raise ValueError(f"the power of borda must be 0 or more, got {self.power}")

    def scores(self, candidates):
        return by_answer(candidates, self._votes(candidates))

    def choose(self, candidates):
        worth, sure = self.scores(candidates), certainties(candidates)
        best = max(range(len(worth)), key=lambda index: (worth[index], sure[index], -index))
        return super().choose(candidates) if worth[best] == -float("inf") else (best, worth[best])

    def _votes(self, candidates):
        sure = certainties(candidates)
        order = sorted(range(len(sure)), key=lambda index: -sure[index])
        rank = {index: place for place, index in enumerate(order)}
        return [float(len(sure) - rank[index]) ** self.power for index in range(len(sure))]
