"""A chain: the best candidate of every node, one per level."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import Expander, Level, candidates, drawn_from
from specjax.tree import Topology, Tree, log_q_of


@dataclasses.dataclass(frozen=True)
class Chain(Expander):
    """A chain of `length` tokens, each the drafter's own draw with the position's shared noise.

    Each draw is an exact sample of the draft's warped distribution, so a chain also serves the classical rejection
    rule.
    """

    about = About("chain", "one token per level, drawn with the position's own noise", "arXiv:2211.17192")

    length: int = 4

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"chain needs length >= 1, got {self.length}")

    @property
    def nodes(self) -> int:
        return self.length + 1

    @property
    def depth(self) -> int:
        return self.length

    def cut(self, depth):
        return Chain(min(self.length, depth))

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def children(self):
        return "coupled"

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        batch = root.shape[0]
        logits = logits[:, None]
        tokens, dists = [], {}
        for depth in range(self.length):
            above = tuple(tokens)
            paths = (lambda above=above: jnp.stack(above, axis=1)[:, None]) if above else None
            tokens.append(candidates(sampler, logits, 1, depth=depth, paths=paths).tokens[:, 0, 0])
            if keep_q:
                dists[depth] = drawn_from(sampler, logits, paths)[:, 0]
            if depth + 1 < self.length:
                level = Level(
                    tokens=tokens[-1][:, None],
                    parent=jnp.full((batch, 1), depth - 1, jnp.int32),
                    visible=jnp.ones((1, 1, depth + 1), bool),
                    depth=depth + 1,
                )
                carry, logits = grow(carry, level)
        nodes = jnp.stack([root, *tokens], axis=1)
        log_q = log_q_of(dists, self.nodes) if keep_q else None
        topology = Topology.chain(self.length)
        return Tree.of(topology, nodes, nodes >= 0, log_q=log_q, children=self.children)
