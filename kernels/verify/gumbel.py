"""Gumbel noise as a function of a key and a token id, in integer operations that run anywhere, also inside a kernel.

The bits are those of `jax.random.gumbel(key, (V,), float32)` under `jax_threefry_partitionable`, where entry i is the
threefry block of the 64-bit counter i, its two words xored.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(first: jax.Array, second: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, section 3.3).

    Args:
      first: uint32, the key's first word; all four broadcast.
      second: uint32, its second word.
      high: uint32, the counter's first word.
      low: uint32, its second word.
    """
    schedule = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    high, low = high + schedule[0], low + schedule[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            high = high + low
            low = high ^ ((low << np.uint32(bits)) | (low >> np.uint32(32 - bits)))
        high = high + schedule[(group + 1) % 3]
        low = low + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def gumbel_noise(first: jax.Array, second: jax.Array, ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise in float32 for token `ids`, independent of other ids in the call.

    Args:
      first: uint32, the first word of the key of a position's draw.
      second: uint32, its second word.
      ids: int32, broadcast with the words.
    """
    high, low = threefry2x32(first, second, jnp.zeros_like(ids).astype(jnp.uint32), ids.astype(jnp.uint32))
    unit = jax.lax.bitcast_convert_type((high ^ low) >> np.uint32(9) | np.uint32(0x3F800000), jnp.float32) - 1
    tiny = np.finfo(np.float32).tiny  # the uniform is in [tiny, 1), as in `jax.random.gumbel`
    return -jnp.log(-jnp.log(jnp.maximum(tiny, unit * (1 - tiny) + tiny)))
