"""The common part of self-speculation: a chain drafted with the target's own lower layers, whose work the target keeps.

Every node of the chain passes the lower layers once. The results (residual stream, keys and values) lie in buffers of
`[B, slots, ...]`, slot i for the chain's node at depth i, and end up in `Proposal.partial`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.base import View
from specjax.lm import Block
from specjax.tree import Tree

Array = jax.Array
PyTree = Any


def block(view: View, tokens: Array, depths: Array | list[int], slots: int) -> Block:
    """Nodes that see the committed prefix, the chain's slots above them, and themselves.

    Args:
      view: the step's.
      tokens: `[B, F]` int32.
      depths: `[F]`; node f sees the slots below `depths[f]`.
      slots: the number of slots.
    """
    depths = jnp.asarray(depths, jnp.int32)
    above = jnp.arange(slots)[None] < depths[:, None]
    visible = jnp.concatenate([above, jnp.eye(depths.shape[0], dtype=bool)], axis=1)[None]
    base = view.length - 1
    return Block(tokens, base[:, None] + depths[None], base, visible)


def room(first: PyTree, slots: int) -> PyTree:
    """Buffers of `slots` with the root's own entries `[B, 1, ...]` in the first."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, slots - 1)) + ((0, 0),) * (x.ndim - 2)), first)


def put(buffers: PyTree, new: PyTree, slot: Array | int) -> PyTree:
    """The buffers with `new` `[B, 1, ...]` in one slot."""
    write = lambda buffer, x: jax.lax.dynamic_update_slice_in_dim(buffer, x, slot, axis=1)
    return jax.tree.map(write, buffers, new)


def complete(view: View, tree: Tree, buffers: PyTree, enter: Callable[[Block, PyTree], PyTree]) -> PyTree:
    """Entries of the whole tree, `[B, N, ...]` in its order: those of the chain and those of the leaves.

    Chain nodes were entered when they were scored. The last node that a live row drafted was not, and neither were
    siblings; one more pass takes in all of them. Entries of invalid nodes are finite and mean nothing.

    Args:
      view: the step's.
      tree: made by `EarlyStop`: every level is a chain node and its siblings.
      buffers: the chain's entries.
      enter: `(block, buffers) -> entries [B, F, ...]` of the block's nodes.
    """
    slots = tree.max_depth + 1
    width = (tree.nodes - 1) // (slots - 1)
    ids = np.arange(1, tree.nodes)
    siblings = ids[(ids - 1) % width > 0]
    last = jnp.max(jnp.where(tree.valid & view.live[:, None], tree.depth, 0))
    node = jnp.maximum(1 + (last - 1) * width, 0)
    tokens = jnp.concatenate(
        [jax.lax.dynamic_slice_in_dim(tree.tokens, node, 1, axis=1), tree.tokens[:, siblings]], axis=1
    )
    depths = jnp.concatenate([last[None], jnp.asarray((siblings - 1) // width + 1, jnp.int32)])
    entries = enter(block(view, tokens, depths, slots), buffers)
    buffers = put(buffers, jax.tree.map(lambda x: x[:, :1], entries), last)
    if width == 1:
        return buffers
    order = np.zeros(tree.nodes, np.int32)
    order[1::width] = 1 + np.arange(slots - 1)
    order[siblings] = slots + np.arange(len(siblings))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[:, 1:]], axis=1)[:, order], buffers, entries)
