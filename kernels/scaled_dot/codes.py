"""The numbers that codes stand for."""

import jax
import jax.numpy as jnp

Array = jax.Array


def decoded(codes: Array, table: tuple[float, ...], dtype: jnp.dtype) -> Array:
    """The numbers of codes, of any shape.

    Args:
      codes: integers or floats of few bits.
      table: the number of each of 16 codes; empty: a code is its number. It is applied by a choice per bit of a code,
        since look-ups would be slow on a TPU.
      dtype: the type of the result.
    """
    if not table:
        return codes.astype(dtype)
    codes, level = codes.astype(jnp.int32), [jnp.asarray(number, dtype) for number in table]
    for bit in range(len(table).bit_length() - 1):
        odd = (codes >> bit & 1) == 1
        level = [jnp.where(odd, above, below) for below, above in zip(level[::2], level[1::2], strict=True)]
    return level[0]
