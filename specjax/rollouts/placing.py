"""Parameters from the layout of training to that of decoding."""

from typing import Any

import jax
from jax.typing import DTypeLike

PyTree = Any


def reshard(decoder: Any, params: PyTree, *, dtype: DTypeLike | None = None) -> PyTree:
    """Parameters on the decoder's mesh, as its steps read them, from whatever mesh and layout they have.

    Devices may be the same or others. Arrays that lie there already are not copied, so pass all of `params`: those that
    were trained, and those that were not. The arrays given stay as they are.

    Args:
      decoder: has a mesh, such as `specjax.speculative(..., mesh="model=2")`.
      params: the decoder's parameters, `{"target": ..., "draft": ...}`.
      dtype: the type of floating-point parameters after the move; None: unchanged.

    Raises:
      ValueError: for a decoder without a mesh.
    """
    if getattr(decoder, "mesh", None) is None:
        raise ValueError(
            "this decoder has no mesh to place parameters on: make it with a mesh, or pass them as they are"
        )
    if dtype is not None:
        typed = lambda x: x.astype(dtype) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x
        params = jax.tree.map(typed, params)
    return jax.device_put(params, decoder.param_shardings(params))
