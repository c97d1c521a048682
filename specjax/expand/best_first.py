"""JetSpec's tree (arXiv:2606.18394): the likeliest node gets all its children, then the likeliest of all that are left."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import Expander, Level, candidates
from specjax.tree import Tree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BestFirst(Expander):
    """Opens the likeliest node, adds its `k` best candidates at once, and goes on until the tree has `nodes` nodes.

    A level's candidates are the same below each of its nodes, so no node is scored alone. A tree of `top_k` keeps the
    best nodes one by one; this one keeps whole groups of siblings, of which the last may be cut.

    Attributes:
      k: children of a node.
      depth: levels below the root.
      nodes: tree nodes, including the root.
      coupled: rank with the shared noise (True), or by the draft's probability alone, as published.
    """

    about = About("best_first", "the likeliest node gets all its children, for drafts in one pass", "arXiv:2606.18394")
    needs_shared = True

    k: int = 3
    depth: int = 3
    nodes: int = 12
    coupled: bool = False

    def __post_init__(self):
        if self.k < 2 or self.depth < 1 or self.nodes < 2:
            raise ValueError(f"best_first needs k and nodes of at least 2 and depth of at least 1, got {self}")
        if self.nodes > self._most(self.depth):
            raise ValueError(
                f"best_first: {self.depth} levels of {self.k} children make at most {self._most(self.depth)} nodes, not "
                f"{self.nodes}"
            )

    @property
    def width(self):
        return self.k

    def _most(self, depth: int) -> int:
        """The nodes of a whole tree."""
        return sum(self.k**level for level in range(depth + 1))

    def cut(self, depth):
        depth = min(self.depth, depth)
        return dataclasses.replace(self, depth=depth, nodes=min(self.nodes, self._most(depth)))

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        tokens, worth = self._levels(logits, grow, carry, sampler)
        batch = root.shape[0]
        opened = -(-(self.nodes - 1) // self.k)
        rows, room = jnp.arange(batch), 1 + opened * self.k  # the last group may go beyond the tree
        whole = lambda value, kind: jnp.full((batch, room), value, kind)
        at_root = lambda array, value: array.at[:, 0].set(value)

        def open_one(turn, tree):
            names, parent, depth, valid, chance, closed = tree
            can = valid & ~closed & (depth < self.depth)
            node = jnp.argmax(jnp.where(can, chance, -jnp.inf), axis=1)
            level, begin = depth[rows, node], 1 + turn * self.k
            group = tokens[rows, level]
            real = can.any(axis=1)[:, None] & (group >= 0)
            put = lambda array, new: jax.lax.dynamic_update_slice(array, new.astype(array.dtype), (0, begin))
            wide = lambda array: jnp.broadcast_to(array[:, None], group.shape)
            return (
                put(names, jnp.where(real, group, -1)),
                put(parent, wide(node)),
                put(depth, wide(level + 1)),
                put(valid, real),
                put(chance, chance[rows, node][:, None] + worth[rows, level]),
                closed.at[rows, node].set(True),
            )

        start = (
            at_root(whole(-1, jnp.int32), root),
            at_root(whole(0, jnp.int32), -1),
            at_root(whole(1, jnp.int32), 0),
            at_root(whole(False, bool), True),
            at_root(whole(-jnp.inf, jnp.float32), 0.0),
            whole(False, bool),
        )
        names, parent, depth, valid, *_ = jax.lax.fori_loop(0, opened, open_one, start)
        cut = lambda array: array[:, : self.nodes]
        return Tree(
            tokens=cut(names), parent=cut(parent), depth=cut(depth), valid=cut(valid), max_depth=self.depth,
            children=self.children,
        )  # fmt: skip

    def _levels(self, logits, grow, carry, sampler) -> tuple[Array, Array]:
        """The candidates of the nodes of every level, and their worth, each `[B, depth, k]`.

        Where warpers walk along paths, they are those below the best node of each level before.
        """
        batch = logits.shape[0]
        best = [candidates(sampler, logits[:, None], self.k, coupled=self.coupled)]
        for depth in range(1, self.depth):
            group = best[-1].tokens[:, 0]
            above = [own.tokens[:, 0, :1] for own in best[:-1]]
            lines = [jnp.broadcast_to(token, (batch, self.k)) for token in above]
            paths = lambda lines=(*lines, group): jnp.stack(lines, axis=2)
            parent = jnp.full((batch, 1), depth - 2, jnp.int32)
            carry, own = grow(carry, Level(group[:, :1], parent, jnp.ones((1, 1, depth), bool), depth))
            best.append(candidates(sampler, own, self.k, nodes=self.k, depth=depth, paths=paths, coupled=self.coupled))
        joined = lambda of_each: jnp.stack([own[:, 0] for own in of_each], axis=1)
        return joined([own.tokens for own in best]), joined([own.worth for own in best])
