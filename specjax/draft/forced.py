"""Jump-forward decoding: what a constraint leaves no choice about is drafted for free (SGLang, arXiv:2312.07104)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Drafter, Proposal, ladder
from specjax.tree import Topology, Tree


@dataclasses.dataclass(frozen=True)
class Forced(Drafter):
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

    @property
    def nodes(self) -> int:
        return self.length + 1

    @property
    def depth(self) -> int:
        return self.length

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def propose(self, params, draft, view, sampler):
        tokens = jnp.concatenate([view.root[:, None], sampler.guessed(self.length)], axis=1)
        return Proposal(Tree.of(Topology.chain(self.length), tokens, tokens >= 0), draft)
