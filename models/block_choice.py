"""Experts that a block of tokens chooses before each of its tokens does (LLaDA2.2, `expert_capacity` of its `config.json`).

A block's experts are the best of the largest scores that any of its tokens gives them. A token then takes its own best
experts among those. Which tokens form a block follows from positions in the text, and from what a token sees. So a pass may
hold several blocks, rows that begin anywhere, and several versions of one block that do not see each other.

Shapes: `B` rows, `T` block tokens, `M = B T` tokens of all rows, `X` experts.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention import Unrolled
from specjax.lm import Block

Array = jax.Array


def leaders(block: Block, size: int) -> Array:
    """The first slot `[B, T]` of the pass that a token sees of its own block of `size` positions.

    Blocks begin at multiples of `size` in the text. Tokens of one block that see each other have one leader. Padding, ids
    below 0, leads nobody.

    Raises:
      ValueError: if tokens do not see the later ones of their block, so that they cannot choose together.
    """
    if block.visible is None and block.causal or isinstance(block.visible, Unrolled):
        raise ValueError(
            f"this model's tokens choose experts together, in blocks of {size}, and this way of reading goes from left to "
            "right: decode it as the block-diffusion model that it is"
        )
    of = block.positions // size
    same = (of[:, :, None] == of[:, None, :]) & _real(block)[:, None, :]
    if block.visible is not None:
        same = same & block.visible[:, :, -same.shape[2] :]
    return jnp.argmax(same, axis=2)


def _real(block: Block) -> Array:
    """The tokens `[B, T]` that are no padding."""
    real = block.tokens >= 0
    return real if block.embedded is None else real | block.embedded


def limited(scores: Array, block: Block, size: int, capacity: int) -> Array:
    """The scores `[M, X]` of tokens, -inf for experts that are not among the `capacity` of their block.

    Args:
      scores: `[M, X]` in float32, by which tokens choose.
      block: the pass.
      size: the length of a block in tokens.
      capacity: how many experts a block chooses.

    Raises:
      ValueError: see `leaders`.
    """
    rows, slots = block.tokens.shape
    lead, each = leaders(block, size), scores.reshape(rows, slots, -1)
    join = jnp.where(_real(block), lead, slots)
    none = jnp.full_like(each, -jnp.inf)
    most = jax.vmap(lambda none, join, each: none.at[join].max(each, mode="drop"))(none, join, each)
    best = jnp.take_along_axis(most, lead[:, :, None], axis=1).reshape(scores.shape)
    chosen = jax.lax.top_k(best, capacity)[1]
    allowed = jnp.put_along_axis(jnp.zeros(scores.shape, bool), chosen, True, axis=1, inplace=False)
    return jnp.where(allowed, scores, -jnp.inf)
