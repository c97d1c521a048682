"""DySpec's greedy tree (Xiong et al. 2024, arXiv:2410.11744): the next draw goes where it is likeliest to be accepted."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import draws
from specjax.expand.dynamic import DynamicTree, Ranked


@dataclasses.dataclass(frozen=True)
class DySpec(DynamicTree):
    """A node's children are draws without replacement; of all possible draws, the `nodes - 1` likeliest to be reached
    are kept.

    A draw is reached with the chance of the path to its parent, times the mass that its earlier siblings leave of the
    parent's distribution. This is known before a child is drawn, so a child's token never decides whether it is
    dropped. Hence rules for draws without replacement keep the target's distribution.

    In greedy rows, whose children are the likeliest tokens, it is the chance of the child itself, and the tree is
    EAGLE-2's.

    Attributes:
      k: how many nodes of a level are scored (those likeliest to be reached), and the most children of a node. With k
        >= `nodes` - 1 the tree equals one made by taking the best from a heap, one by one.
      depth: levels below the root.
      nodes: kept tree nodes, including the root.
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
        # draws further down decide whether a node has another child, so no other step may use their noise
        found = draws(sampler.once(), logits, self.k, nodes=nodes, depth=depth, paths=paths)
        before = jax.lax.cumlogsumexp(jnp.concatenate([found.log_q, found.left], axis=2), axis=2, reverse=True)
        turn = jax.lax.cummin(jnp.minimum(before[..., :-1], 0), axis=2)  # exactly in order, whatever the rounding
        sampled = (sampler.params.temperature > 0)[:, None, None]
        rank = jnp.where(found.tokens >= 0, jnp.where(sampled, turn, found.log_q), -jnp.inf)
        above = value[:, :, None]
        return Ranked(found.tokens, above + rank, above + jnp.minimum(found.log_q, rank))
