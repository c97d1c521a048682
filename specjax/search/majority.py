"""Self-consistency (Wang et al. 2022): the answer that most completions come to."""

import dataclasses

from specjax.about import About
from specjax.search.selection import Selection, by_answer


@dataclasses.dataclass(frozen=True)
class Majority(Selection):
    """A completion is worth as many votes as have its answer; of equal answers the first is taken."""

    about = About("majority", "the answer of most completions", "arXiv:2203.11171", "own text")

    def scores(self, candidates):
        return by_answer(candidates, [1.0] * len(candidates))
