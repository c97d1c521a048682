"""What lies on one chip."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def chip_bytes(tree: Any) -> int:
    """Bytes of a chip's shards."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * _bits(leaf.dtype) // 8
    return total


def _bits(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return 64
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize
