"""RASD: a drafted tree joined with retrieved continuations that the draft finds plausible (arXiv:2503.03434)."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.base import ladder
from specjax.draft.fuse import Fused, union
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Rasd(Fused):
    """The union of drafter `a`'s tree and retriever `b`'s; of `b`'s, only sequences whose first token `a` might draft.

    The paper prunes by the draft's distribution after the root. Here a drafter is anything that proposes a tree, so its
    distribution appears as the root's children, best first. A row for which it proposes nothing keeps all retrieved
    sequences.

    Attributes:
      limit: nodes kept of the union; None keeps all.
      first: a retrieved sequence stays if its first token is among this many of the drafted root's children.
    """

    first: int = 10

    def __post_init__(self):
        super().__post_init__()
        if self.first < 1:
            raise ValueError(f"rasd needs first >= 1, got {self.first}")

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def _together(self, a, b):
        return union(a, pruned(b, a, self.first), self.nodes)


def pruned(retrieved: Tree, drafted: Tree, first: int) -> Tree:
    """`retrieved` `[B, M]`, keeping only sequences whose first token is among the `first` first children of `drafted`."""
    children = drafted.valid & (drafted.depth == 1)
    best = children & (jnp.cumsum(children, axis=1) <= first)
    known = jnp.any((retrieved.tokens[:, :, None] == drafted.tokens[:, None]) & best[:, None], axis=2)
    out = (retrieved.depth == 1) & ~known & children.any(axis=1, keepdims=True)
    stays = retrieved.valid & ~jnp.any(retrieved.ancestors() & out[:, None], axis=2)
    return dataclasses.replace(retrieved, valid=stays, tokens=jnp.where(stays, retrieved.tokens, -1))
