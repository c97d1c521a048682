"""The arrays that one chip holds."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def chip_bytes(tree: Any) -> int:
    """Bytes of a chip's shards, without what lies in the host's memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if getattr(leaf.sharding, "memory_kind", None) == "pinned_host":
            continue
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * _bits(leaf.dtype) // 8
    return total


def unread(params: Any) -> list[Any]:
    """The parameters that a step does not read, or of which it reads only the rows of its nodes.

    These are tables of embeddings without a tied head, encoders, and what makes the keys and values of a source.

    Args:
      params: nested dicts; a dict with an `embed` and no `head` uses the table as its head too.
    """
    if not isinstance(params, dict):
        return []
    apart = ("layer_inputs", "encoder", "cross")
    inside = [part for name, own in params.items() if name not in apart for part in unread(own)]
    inside += [params["embed"]] if {"embed", "head"} <= params.keys() else []
    inside += [params["layer_inputs"]["embed"]] if "layer_inputs" in params else []
    inside += [params["encoder"]] if "encoder" in params else []
    return inside + ([params["cross"]["k"], params["cross"]["v"]] if "cross" in params else [])


def _bits(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return 64
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize
