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

    The nodes of a level must share one distribution, as those of `dflash` and `medusa` do. Then a level's candidates
    are the same below each of its nodes, and no node is scored alone. A tree of `top_k` keeps the best nodes one by one;
    this one keeps whole groups of siblings, of which the last may be cut.

    Attributes:
      k: children of a node.
      depth: levels below the root.
      nodes: tree nodes, including the root.
      coupled: rank with the shared noise (True), or by the draft's probability alone, as published.
    """

    about = About(
        "best_first",
        "the likeliest node gets all its children, for drafts in one pass",
        "arXiv:2606.18394",
        defaults={"coupled": False},
    )

    k: int = 3
    depth: int = 3
    nodes: int = 12
    coupled: bool = True

    def __post_init__(self):
        if self.k < 2 or self.depth < 1 or self.nodes < 2:
            raise ValueError(f"best_first needs k and nodes of at least 2 and depth of at least 1, got {self}")
        most = sum(self.k**level for level in range(self.depth + 1))
        if self.nodes > most:
            raise ValueError(
                f"best_first: {self.depth} levels of {self.k} children make at most {most} nodes, not {self.nodes}"
            )

    @property
    def width(self):
        return self.k

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
        """The candidates of the nodes of every level, and their worth, each `[B, depth, k]`."""
        best = [candidates(sampler, logits[:, None], self.k, coupled=self.coupled)]
        for depth in range(1, self.depth):
            # two nodes, so that a drafter shows whether they share a distribution: the best two below the best before
            count = 2 * depth
            above = range(0, count - 2, 2)
            visible = jnp.asarray([[node in (*above, count - 2 + own) for node in range(count)] for own in (0, 1)])[
                None
            ]
            parent = jnp.full((logits.shape[0], 2), 2 * depth - 4 if depth > 1 else -1, jnp.int32)
            carry, own = grow(carry, Level(best[-1].tokens[:, 0, :2], parent, visible, depth))
            if own.shape[1] != 1:
                raise ValueError(
                    "best_first takes drafters whose levels share one distribution, such as dflash and medusa: choose "
                    "expander=top_k for this one"
                )
            line = [own.tokens[:, 0, :1] for own in best[:-1]]
            paths = lambda line=line, last=best[-1].tokens: jnp.stack(
                [jnp.concatenate([*line, last[:, 0, own : own + 1]], axis=1) for own in (0, 1)], axis=1
            )
            best.append(candidates(sampler, own, self.k, nodes=2, depth=depth, paths=paths, coupled=self.coupled))
        return tuple(jnp.stack([getattr(own, name)[:, 0] for own in best], axis=1) for name in ("tokens", "worth"))
