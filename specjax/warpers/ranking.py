"""Cuts of a ranking without a sort: the value at which the mass above it reaches a share."""

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Float

BITS = 32


def reached(values: Float[Array, "*B V"], mass: Float[Array, "*B V"] | float, share: Float[Array, "*B"]) -> Array:
    """The largest value v, `[*B]`, for which the values >= v have at least the mass `share`; -inf if all values have
    too little.

    Floats are ordered like their bits, so 32 sums find v, one for each of its bits. Sorting a large vocabulary costs
    several times more on a CPU.

    Args:
      values: `[*B, V]` float32.
      mass: `[*B, V]` float32 >= 0, or one number for every value.
      share: `[*B]` float32.
    """
    high = jnp.uint32(1 << (BITS - 1))
    bits = jax.lax.bitcast_convert_type(values + 0.0, jnp.uint32)  # so that -0 is 0
    ranks = jnp.where(bits >= high, ~bits, bits | high)

    def narrow(bit, found):
        tried = found | (high >> bit.astype(jnp.uint32))
        return jnp.where(jnp.where(ranks >= tried[..., None], mass, 0.0).sum(axis=-1) >= share, tried, found)

    found = jax.lax.fori_loop(0, BITS, narrow, jnp.zeros(values.shape[:-1], jnp.uint32))
    value = jax.lax.bitcast_convert_type(jnp.where(found >= high, found ^ high, ~found), jnp.float32)
    return jnp.where(found == 0, -jnp.inf, value)
