"""The arrays that one chip holds."""

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


def looked_up(params: Any) -> list[Any]:
    """The tables of embeddings of which a step reads only the rows of its nodes: those without a tied head.

    Args:
      params: nested dicts; a dict with an `embed` and no `head` uses the table as its head too.
    """
    if not isinstance(params, dict):
        return []
    inside = [table for name, part in params.items() if name != "layer_inputs" for table in looked_up(part)]
    own = [params["embed"]] if {"embed", "head"} <= params.keys() else []
    return inside + own + ([params["layer_inputs"]["embed"]] if "layer_inputs" in params else [])


def _bits(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return 64
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize
