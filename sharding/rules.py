"""From logical axis names to shardings: the one place that decides what is split and what is replicated."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
}
"""Mesh axis of each logical axis; a name that is not here is replicated."""


def partition(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], counts: dict[str, int]
) -> PartitionSpec:
    """How one array is split. A dimension that its mesh axis does not divide is replicated.

    Args:
      mesh: the mesh.
      axes: a logical name, or None, for every dimension.
      shape: the array's.
      counts: units of an axis that must stay whole (heads), where they are not the dimension's size.
    """
    spec = []
    for name, size in zip(axes, shape, strict=True):
        target = RULES.get(name or "")
        whole = target in mesh.shape and size % mesh.shape[target] == 0
        spec.append(target if whole and counts.get(name or "", size) % mesh.shape[target] == 0 else None)
    return PartitionSpec(*spec)


def shardings(mesh: Mesh, axes: Any, tree: Any, counts: dict[str, int] | None = None) -> Any:
    """A `NamedSharding` for every leaf of `tree`.

    Args:
      mesh: the mesh.
      axes: a pytree like `tree` with a tuple of logical names at every leaf.
      tree: arrays or `ShapeDtypeStruct`s.
      counts: see `partition`.
    """
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, partition(mesh, names, leaf.shape, counts or {})), tree, axes
    )
