"""Rows of a batch when each of several processes reads its own."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax.sharding.rules import partition


def own_rows(mesh: Mesh | None, count: int) -> np.ndarray:
    """The rows of a batch on this process's devices, in order; all rows if there is only one process.

    Args:
      mesh: splits the rows over its axis `data`.
      count: the number of rows of the whole batch.
    """
    if mesh is None:
        return np.arange(count)
    place = NamedSharding(mesh, partition(mesh, ("batch",), (count,), {}))
    return np.unique([np.arange(count)[at] for at in place.addressable_devices_indices_map((count,)).values()])


def placed_rows(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """The array of a batch over the mesh, from every process's `own_rows`."""
    count = len(rows) * mesh.shape["data"] // mesh.local_mesh.shape["data"]
    shape = (count, *rows.shape[1:])
    place = NamedSharding(mesh, partition(mesh, ("batch",) + (None,) * (rows.ndim - 1), shape, {}))
    return jax.make_array_from_process_local_data(place, rows, shape)
