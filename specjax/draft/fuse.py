"""Two drafters, one tree: both proposals under one root."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.base import Drafter, Proposal
from specjax.lm import Wants
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Fused(Drafter):
    """The union of two drafters' trees; the second one's nodes come after the first one's. See `fuse`.

    Its `params["draft"]` is the pair of theirs, None for a part without parameters.
    """

    a: Drafter
    b: Drafter

    @property
    def nodes(self) -> int:
        return self.a.nodes + self.b.nodes - 1

    @property
    def depth(self) -> int:
        return max(self.a.depth, self.b.depth)

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def wants(self) -> Wants:
        return self.a.wants | self.b.wants

    @property
    def prefill_wants(self) -> Wants:
        return self.a.prefill_wants | self.b.prefill_wants

    def bind(self, target):
        return Fused(self.a.bind(target), self.b.bind(target))

    def init(self, params, batch, capacity):
        first, second = self._split(params)
        return self.a.init(first, batch, capacity), self.b.init(second, batch, capacity)

    def axes(self, draft):
        return self.a.axes(draft[0]), self.b.axes(draft[1])

    def prefill(self, params, draft, chunk, output):
        first, second = self._split(params)
        return self.a.prefill(first, draft[0], chunk, output), self.b.prefill(second, draft[1], chunk, output)

    def propose(self, params, draft, view, sampler):
        first, second = self._split(params)
        first = self.a.propose(first, draft[0], view, sampler)
        second = self.b.propose(second, draft[1], view, sampler)
        for proposal in (first, second):
            if proposal.extra is not None or proposal.partial is not None:
                raise ValueError("fuse takes drafters of plain trees: one of these adds extra slots or a partial stack")
        return Proposal(_join(first.tree, second.tree), (first.draft, second.draft))

    def observe(self, params, draft, proposal, output, verdict):
        first, second = self._split(params)
        return (
            self.a.observe(first, draft[0], proposal, output, verdict),
            self.b.observe(second, draft[1], proposal, output, verdict),
        )

    def _split(self, params):
        first, second = params["draft"] or (None, None)
        return {**params, "draft": first}, {**params, "draft": second}


def fuse(a: Drafter, b: Drafter) -> Fused:
    """One drafter from two. The text does not change; the step verifies both trees at once."""
    return Fused(a, b)


def _join(a: Tree, b: Tree) -> Tree:
    shift = a.nodes - 1
    parent = jnp.where(b.parent[:, 1:] > 0, b.parent[:, 1:] + shift, b.parent[:, 1:])
    cat = lambda x, y: jnp.concatenate([x, y], axis=1)
    return Tree(
        tokens=cat(a.tokens, b.tokens[:, 1:]),
        parent=cat(a.parent, parent),
        depth=cat(a.depth, b.depth[:, 1:]),
        valid=cat(a.valid, b.valid[:, 1:]),
        max_depth=max(a.max_depth, b.max_depth),
        topology=a.topology.join(b.topology) if a.topology and b.topology else None,
    )
