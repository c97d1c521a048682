"""Borda voting (Kang et al. 2025): votes for answers, weighted by how sure the model was of the completion."""

import dataclasses

from specjax.about import About
from specjax.search.selection import Selection, by_answer, certainties


@dataclasses.dataclass(frozen=True)
class Borda(Selection):
    """The r-th of N completions by self-certainty gives `(N - r + 1) ** power` votes to its answer.

    Completions without an answer have ranks but no votes. Ties go to the earlier one: the first of equally sure
    completions has the better rank, and among answers with equal votes the first wins. The first completion with the
    winning answer is taken.

    Attributes:
      power: 0 is a majority vote.
    """

    about = About("borda", "the answer of most completions, the surer ones first", "arXiv:2502.18581", "own text")
    reads_certainty = True

    power: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.power < float("inf"):
            raise ValueError(f"the power of borda must be 0 or more, got {self.power}")

    def scores(self, candidates):
        sure = certainties(candidates)
        order = sorted(range(len(sure)), key=lambda index: -sure[index])
        rank = {index: place for place, index in enumerate(order)}
        return by_answer(candidates, [float(len(sure) - rank[index]) ** self.power for index in range(len(sure))])
