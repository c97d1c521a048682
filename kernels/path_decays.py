"""How much of a state and of earlier contributions is left at a token that follows others.

Shapes: `B` rows, `T` block tokens, `P` tokens before the block.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def decays(log_decay: Array, seen: Array) -> tuple[Array, Array]:
    """How much of the state and of each ancestor's contribution is left at a token.

    Args:
      log_decay: `[B, P + T, ...]` float32, at most 0: the logarithm of the factor by which a token shrinks what is before it.
      seen: `[B or 1, T, P + T]` bool, the ancestors of a token, and itself. Ancestors come first.

    Returns:
      `[B, T, ...]`, what is left of the state; and `[B, T, P + T, ...]`, what is left of a contribution, 0 unless `seen`.
    """
    mask = seen.reshape(*seen.shape, *[1] * (log_decay.ndim - 2))
    own = jnp.where(mask, log_decay[:, None], 0)
    since, later = since_each(own, 2)
    return jnp.exp(since[:, :, 0]), jnp.where(mask, jnp.exp(later), 0)


def since_each(x: Array, axis: int) -> tuple[Array, Array]:
    """Sums of every entry and those after it, and of those after it alone: a difference of the two would round."""
    since = jnp.flip(jnp.cumsum(jnp.flip(x, axis), axis=axis), axis)
    last = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis))
    return since, jnp.concatenate([jax.lax.slice_in_dim(since, 1, None, axis=axis), last], axis=axis)
