"""Jump-forward decoding: what a constraint leaves no choice about is drafted for free (SGLang, arXiv:2312.07104)."""

import dataclasses

from specjax.about import About
from specjax.draft.base import ChainDrafter


@dataclasses.dataclass(frozen=True)
class Forced(ChainDrafter):
    """A chain along the only text that may follow, such as the name of the next property; no parameters, no state.

    A text may be written by other tokens too, so the chain is a guess. Rows without a constraint have no draft.

    Attributes:
      length: how many tokens to propose, at most.
    """

    about = About("forced", "writes what a constraint leaves no choice about", "arXiv:2312.07104")

    length: int = 8

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"forced needs length >= 1, got {self}")

    def propose(self, params, draft, view, sampler):
        return self.chain(view, sampler.guessed(self.length), draft)
