"""From logical axis names to shardings: the one place that decides which arrays are split or replicated."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "state_heads": "model",
    "mlp": "model",
    "expert": "model",
    "expert_mlp": "model",
    "slots": "context",
    "source": "context",
    "tokens": "context",
}
"""The mesh axis of each logical axis; other names are replicated.

`slots` are a cache's, and `source` those of what an encoder has read. `tokens` are those of a block that `Block.split` allows
a mesh to split. Of `expert` (the number of the expert) and `expert_mlp` (an expert's inner width), only one is split; see
`whole_experts`.
"""
_LANES = 128


def parts(mesh: Mesh | AbstractMesh | None, name: str) -> int:
    """The number of parts into which a mesh splits a logical axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape.get(RULES[name], 1)


def rounded(mesh: Mesh | AbstractMesh | None, name: str, size: int) -> int:
    """A size of a logical axis, rounded up to a multiple that the mesh divides."""
    count = parts(mesh, name)
    return -(-size // count) * count


def whole_experts(mesh: Mesh | AbstractMesh, count: int, inner: int) -> bool:
    """Whether every device holds some whole experts rather than a part of each.

    Parts keep all devices equally busy, whatever experts the tokens choose. But if a part is not a multiple of the 128
    lanes of matrix units, a TPU's compiler copies the matrices of all experts in every step. Then experts stay whole,
    if the mesh divides their number.

    Args:
      mesh: the mesh.
      count: the number of experts of a layer.
      inner: an expert's inner width.
    """
    own = parts(mesh, "expert")
    return own > 1 and count % own == 0 and inner % (own * _LANES) != 0


def partition(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...], counts: dict[str, int]
) -> PartitionSpec:
    """The partition of one array. A dimension that its mesh axis does not divide is replicated.

    Args:
      mesh: the mesh.
      axes: a logical name, or None, for every dimension.
      shape: the array's shape.
      counts: the number of units of an axis that must stay whole (heads), if it is not the dimension's size. An array
        with an axis `expert` needs the counts of `expert` and `expert_mlp`; without them it is split by the latter.

    Raises:
      ValueError: if two dimensions would be split over one mesh axis.
    """
    if "expert" in axes:
        kept = whole_experts(mesh, counts.get("expert", 1), counts.get("expert_mlp", 1))
        axes = tuple(None if name == ("expert_mlp" if kept else "expert") else name for name in axes)
    spec: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        target = RULES.get(name or "")
        whole = target in mesh.shape and size % mesh.shape[target] == 0
        if not whole or counts.get(name or "", size) % mesh.shape[target]:
            target = None
        if target and target in spec:
            first = axes[spec.index(target)]
            raise ValueError(
                f"the axes {first!r} and {name!r} of an array {shape} both want the mesh axis {target!r}: unname one"
            )
        spec.append(target)
    return PartitionSpec(*spec)


def shardings(mesh: Mesh, axes: Any, tree: Any, counts: dict[str, int] | None = None) -> Any:
    """A `NamedSharding` for every leaf of `tree`.

    Args:
      mesh: the mesh.
      axes: a pytree like `tree` with a tuple of logical names at every leaf.
      tree: a pytree of arrays or of `ShapeDtypeStruct`.
      counts: see `partition`.
    """
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, partition(mesh, names, leaf.shape, counts or {})), tree, axes
    )


def fully_sharded(places: Any, tree: Any) -> Any:
    """Shardings that also split over the mesh axis of `batch`: the first whole dimension of an array that it divides.

    Args:
      places: from `shardings`.
      tree: a pytree of arrays or of `ShapeDtypeStruct`.
    """
    own = RULES["batch"]

    def one(leaf, place):
        spec = [*place.spec, *[None] * (leaf.ndim - len(place.spec))]
        size = place.mesh.shape.get(own, 1)
        free = [i for i, name in enumerate(spec) if name is None and leaf.shape[i] % size == 0]
        if size > 1 and free:
            spec[free[0]] = own
        return NamedSharding(place.mesh, PartitionSpec(*spec))

    return jax.tree.map(one, tree, places)


def placed(tree: Any, places: Any) -> Any:
    """`ShapeDtypeStruct`s with shardings, for programs that are compiled but not run.

    Args:
      tree: a pytree of arrays or of `ShapeDtypeStruct`.
      places: a pytree of shardings like `tree`.
    """
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def replicated(mesh: Mesh, tree: Any) -> Any:
    """A sharding for every leaf of `tree` that copies it to each device."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)


def constrain(mesh: Mesh | None, axes: Any, tree: Any) -> Any:
    """The tree constrained to its shardings inside jit, so that calls take and return one layout; unchanged without a
    mesh.

    Args:
      mesh: the mesh, or None.
      axes: see `shardings`. A dimension of heads has one entry for each head, so there are no `counts`.
      tree: a pytree of arrays.
    """
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, shardings(mesh, axes, tree))
