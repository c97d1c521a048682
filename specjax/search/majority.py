"""Self-consistency (Wang et al. 2022): the answer that the most completions give."""

import dataclasses

from specjax.about import About
from specjax.search.selection import Selection, by_answer


@dataclasses.dataclass(frozen=True)
class Majority(Selection):
    """A completion is worth the number of completions with its answer; on a tie the first is taken."""

    about = About("majority", "the answer of most completions", "arXiv:2203.11171", "own text")

    def scores(self, candidates):
        return by_answer(candidates, [1.0] * len(candidates))
