"""No drafter: plain decoding is the same step with a tree of one node."""

import dataclasses

from specjax.about import About
from specjax.draft.base import Drafter, Proposal
from specjax.tree import root_only


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """Plain autoregressive decoding: one target pass per token."""

    about = About("none", "plain decoding", "-")

    nodes = 1
    depth = 0

    def propose(self, params, draft, view, sampler):
        return Proposal(root_only(view.root), draft)
