"""What lies on one chip."""

import math
from typing import Any

import jax


def chip_bytes(tree: Any) -> int:
    """Bytes of a chip's shards."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        total += math.prod(shape) * size
    return total
