"""Best of N by self-certainty (Kang et al. 2025): the completion whose distributions were the furthest from uniform."""

import dataclasses
import math

from specjax.about import About
from specjax.search.selection import Selection, certainties


@dataclasses.dataclass(frozen=True)
class SelfCertainty(Selection):
    """A completion is worth its self-certainty: the mean over its tokens of the uniform distribution's divergence from
    the model's.
    """

    about = About("self_certainty", "the completion that the model was surest of", "arXiv:2502.18581", "own text")
    reads_certainty = True

    def scores(self, candidates):
        own = zip(certainties(candidates), candidates, strict=True)
        return [-math.inf if candidate.answer is None else certainty for certainty, candidate in own]
