"""The common parts of rules that judge whole paths."""

import jax
import jax.numpy as jnp

from specjax.tree import Tree
from specjax.verify.base import Verdict
from specjax.verify.top_down import at

Array = jax.Array


def entropy(p: Array) -> Array:
    """The entropy of distributions `[..., V]`, in nats `[...]`."""
    return -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(axis=-1)


def longest(ends: Array, chance: Array, tree: Tree) -> Array:
    """The deepest node `[B]` at which a path may end; on a tie the node of the likeliest path.

    Args:
      ends: `[B, N]` bool, whether a path may end there; always true for the root.
      chance: `[B, N]`, each node's chance after its parent; the root's is not used.
      tree: the nodes' tree.
    """
    deepest = ends & (tree.depth == jnp.where(ends, tree.depth, -1).max(axis=1, keepdims=True))
    log_chance = jnp.log(jnp.maximum(chance, jnp.finfo(chance.dtype).tiny)).at[:, 0].set(0)
    worth = jnp.where(tree.ancestors(), log_chance[:, None], 0).sum(axis=-1)
    return jnp.argmax(jnp.where(deepest, worth, -jnp.inf), axis=1)


def kept(passes: Array, chance: Array, draw: Array, tree: Tree) -> Verdict:
    """The longest path of passing nodes, on a tie the likeliest, and the target's own draw after it.

    Args:
      passes: `[B, N]` bool; the root's is not used.
      chance: `[B, N]`, each node's chance after its parent; the root's is not used.
      draw: `[B, N]` int32, the target's own draw after every node.
      tree: the nodes' tree.
    """
    above = tree.ancestors()
    node = longest(jnp.all(passes.at[:, 0].set(True)[:, None] | ~above, axis=-1), chance, tree)
    return Verdict(tree.path_to(node, above), at(tree.depth, node), at(draw, node))
