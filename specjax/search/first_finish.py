"""First-finish search (Agarwal et al. 2025): of several completions the one that ends first; the others are stopped then."""

import dataclasses
import math

from specjax.about import About
from specjax.search.selection import Selection


@dataclasses.dataclass(frozen=True)
class FirstFinish(Selection):
    """The shortest completion that ends by itself, of equal ones the first; what it says does not matter.

    So it is the one that ends first where all are written side by side, a token per step, and it is the same one where
    they
    are not: in rows of a smaller batch, or with a drafter.
    """

    about = About(
        "first_finish", "the completion that ends first; the others are stopped then", "arXiv:2505.18149", "own text"
    )
    stops_others = True

    def scores(self, candidates):
        return [-float(one.length) if one.ended else -math.inf for one in candidates]
