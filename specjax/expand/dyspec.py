"""DySpec's greedy tree (Xiong et al. 2024, arXiv:2410.11744): the next draw is where it is likeliest to be accepted."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import draws
from specjax.expand.dynamic import DynamicTree, Ranked


@dataclasses.dataclass(frozen=True)
class DySpec(DynamicTree):
    """A node's children are draws without replacement. Of all that could be drawn those `nodes - 1` are kept whose turn is most
    likely to come: the chance of the path that leads to their parent, times what its earlier children leave of its
    distribution.

    That is known before a child is drawn, so a child is never dropped for what it turned out to be, and rules for draws without
    replacement keep the target's distribution. In greedy rows, whose children are the likeliest, it is the chance of
    the child itself, and the tree is EAGLE-2's.

    Attributes:
      k: how many nodes of a level are scored, those whose turn is likeliest, and the most children of a node. Of
        k >= `nodes` - 1 the tree is that of a heap from which the best is taken one by one.
      depth: levels below the root.
      nodes: kept tree nodes, the root included.
    """

    about = About("dyspec", "draws without replacement, each where it is likeliest to be accepted", "arXiv:2410.11744")

    k: int = 4
    depth: int = 4
    nodes: int = 12

    start = 0.0

    def __post_init__(self):
        most = 1 + self.k + (self.depth - 1) * self.k * self.k
        if self.k < 1 or self.depth < 1 or not 2 <= self.nodes <= most:
            raise ValueError(f"dyspec needs k, depth >= 1 and nodes in [2, {most}], got {self}")

    @property
    def children(self):
        return "without_replacement"

    def choose(self, sampler, logits, value, *, nodes, depth, paths):
        # draws further down decide whether a node has another child, so no other step may have their noise
        found = draws(sampler.once(), logits, self.k, nodes=nodes, depth=depth, paths=paths)
        before = jax.lax.cumlogsumexp(jnp.concatenate([found.log_q, found.left], axis=2), axis=2, reverse=True)
        turn = jax.lax.cummin(jnp.minimum(before[..., :-1], 0), axis=2)  # exactly in order, whatever the rounding
        sampled = (sampler.params.temperature > 0)[:, None, None]
        rank = jnp.where(found.tokens >= 0, jnp.where(sampled, turn, found.log_q), -jnp.inf)
        above = value[:, :, None]
        return Ranked(found.tokens, above + rank, above + jnp.minimum(found.log_q, rank))
