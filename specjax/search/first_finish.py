"""First-finish search (Agarwal et al. 2025): takes the completion that ends first; the others are stopped then."""

import dataclasses
import math

from specjax.about import About
from specjax.search.selection import Selection


@dataclasses.dataclass(frozen=True)
class FirstFinish(Selection):
    """The shortest completion that ends by itself, on a tie the first; its content does not matter.

    If all are written side by side, one token per step, it is the one that ends first. The result is the same if they
    are not: in rows of a smaller batch, or with a drafter.
    """

    about = About(
        "first_finish", "the completion that ends first; the others are stopped then", "arXiv:2505.18149", "own text"
    )
    stops_others = True

    def scores(self, candidates):
        return [-float(one.length) if one.ended else -math.inf for one in candidates]
