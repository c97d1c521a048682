"""Token Recycling: a table of each token's likeliest successors, refreshed from every verified node (Luo et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, ladder
from specjax.draft.table import TableDrafter
from specjax.tree import Tree

Array = jax.Array

PUBLISHED_TREE = (
    "8 | 8 4 3 2 1x4 | 8 3 2 1x5 2 1 0x2 1 0x2 1 0 1x2 | 5 2 1x3 0x3 1 0x2 1 0x6 1 0x2 1x2"
    " | 3 1x2 0x2 1 0x4 1 0 1 | 2 0x2 1"
)


@dataclasses.dataclass(frozen=True)
class TokenRecycling(TableDrafter):
    """A static tree filled by lookups in a `[V, k]` table that all rows share; sharing changes speed, never text.

    Attributes:
      k: successors kept for a token.
      tree: child counts level by level (`Topology.from_counts`); `PUBLISHED_TREE` has the paper's 80 nodes.
    """

    about = About(
        "token_recycling", "a table of each token's latest likely successors", "arXiv:2408.08696",
        paper=f"tree={PUBLISHED_TREE}",
    )  # fmt: skip

    k: int = 8
    tree: str = "3 | 2 1 1 | 1x3 | 1x2 | 1 | 1"

    @property
    def alone(self) -> bool:
        return False

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def init(self, params, batch, capacity):
        return jnp.full((self.vocab_size, self.k), -1, jnp.int32)

    def axes(self, draft):
        return (None, None)

    def propose(self, params, draft, view, sampler):
        topology = self.topology
        columns = [view.root]
        for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
            above = columns[parent]
            columns.append(jnp.where(above >= 0, draft[jnp.maximum(above, 0), rank], -1))
        tokens = jnp.stack(columns, axis=1)
        return Proposal(Tree.of(topology, tokens, tokens >= 0), draft)

    def observe(self, params, draft, proposal, output, verdict):
        tree = proposal.tree
        live = (verdict.committed > 0)[:, None]
        successors = output.topk[1][:, : tree.nodes, : self.k].reshape(-1, self.k)  # others may want more
        return refresh(draft, jnp.where(tree.valid & live, tree.tokens, -1).reshape(-1), successors)


def refresh(table: Array, tokens: Array, successors: Array) -> Array:
    """Overwrites the rows of `tokens` `[M]` (-1: none) with `successors` `[M, k]`; the last of equal tokens wins."""
    vocab = table.shape[0]
    index = jnp.where(tokens >= 0, tokens, vocab)
    order = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    last = jnp.full((vocab,), -1, jnp.int32).at[index].max(order, mode="drop")
    wins = (tokens >= 0) & (last[jnp.maximum(tokens, 0)] == order)
    return table.at[jnp.where(wins, tokens, vocab)].set(successors.astype(table.dtype), mode="drop")
