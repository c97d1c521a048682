"""The layout of tables of embeddings in memory.

A TPU's default layout of a matrix is the one with the least padding. For a table whose rows are not a multiple of 128
numbers, it is column by column (the 2,880 of gpt-oss). Rows cannot be looked up in that layout, so the compiler would
copy the table in every step.
"""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout


def by_rows(params: Any, platform: str = "tpu") -> Any:
    """Parameters with the table of embeddings stored row by row, unless a head reads it too.

    Args:
      params: nested dicts of arrays, or of `ShapeDtypeStruct`s with shardings.
      platform: the platform of the devices.
    """
    if not {"embed", "head"} <= params.keys():
        return params
    return {**params, "embed": jax.tree.map(lambda x: _by_rows(x, platform), params["embed"])}


def _by_rows(x: Any, platform: str) -> Any:
    if x.ndim != 2 or x.sharding is None or next(iter(x.sharding.device_set)).platform != platform:
        return x
    form = Format(Layout(major_to_minor=(0, 1)), x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=form)
    return jax.device_put(x, form)
