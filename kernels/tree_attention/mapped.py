"""Tree attention on a mesh: each device works on its own rows, kv-heads and cache slots, and the cache does not travel.

The compiler partitions neither Mosaic nor Triton calls, so the mesh must be known where they are traced. It is JAX's
ambient mesh (`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` inside jit), which decoders with a mesh set.

If slots are split, every device applies all queries to its part of the prefix, and the results are merged by their
log-sum-exps, as Flash-Decoding (Dao et al. 2023) does on one GPU. So messages have the size of the queries, not of the
cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import Operands, finished, merged
from specjax.sharding.ambient import says_nothing
from specjax.sharding.rules import partition

AXES = Operands(
    queries=("batch", "kv_heads", None, None),
    key=("batch", "kv_heads", None, None),
    value=("batch", "kv_heads", None, None),
    cache_key=("batch", "kv_heads", "slots", None),
    cache_value=("batch", "kv_heads", "slots", None),
    length=("batch",),
    visible=("batch", None, None),
    query_positions=("batch", None),
    unseen=("batch", "slots"),
    key_scale=("batch", "kv_heads", "slots"),
    value_scale=("batch", "kv_heads", "slots"),
    sinks=("kv_heads", None),
    cache_positions=("batch", "slots"),
    key_positions=("batch", None),
    distances=("kv_heads", None, None),
)
"""Logical axes of the operands of `api.attend_with`."""


def specs(mesh: jax.sharding.AbstractMesh, operands: Operands, axes: Operands) -> Operands:
    """The partition of the operands on a mesh, None for missing ones.

    Args:
      mesh: the mesh.
      operands: the operands.
      axes: their logical axes.
    """
    place = lambda x, names: None if x is None else partition(mesh, names, x.shape, {})
    return Operands(**{name: place(x, getattr(axes, name)) for name, x in vars(operands).items()})


def slots_axis(mesh, operands):
    """The mesh axis that splits the cache's slots; None if none does."""
    if says_nothing(mesh) or operands.cache_key is None:
        return None
    axis = partition(mesh, AXES.cache_key, operands.cache_key.shape, {})[2]
    return None if axis is None or mesh.shape[axis] == 1 else axis


def numbered(operands, first):
    """The queries' positions for comparison with slots that begin at `first`: numbered like these, except for a
    ring."""
    positions = operands.query_positions
    return positions if positions is None or operands.cache_positions is not None else positions - first


def per_device(way, mesh, **options):
    """A kernel as a function of every device's part of the operands, according to the ambient `mesh` (maybe empty).

    Args:
      way: a module that has `attend`, of operands and `options`.
      mesh: maybe empty.
      **options: see `api.attend_with`.
    """
    attend = functools.partial(way.attend, **options)

    def mapped(operands: Operands) -> jax.Array:
        if slots_axis(mesh, operands):
            return over_slots(way, mesh, **options)(operands)
        with jax.sharding.use_abstract_mesh(mesh):  # a kernel may ask the mesh for which chip it is compiled
            if says_nothing(mesh):  # one device, or an already mapped caller
                return attend(operands)
            places = specs(mesh, operands, AXES)
            return jax.shard_map(attend, in_specs=(places,), out_specs=places.queries, check_vma=False)(operands)

    return mapped


def over_slots(way, mesh, **options):
    """An implementation over split slots; without split slots, its `attend`, which the compiler partitions.

    Args:
      way: a module that has `attend` and `find`, of operands and `options`.
      mesh: maybe empty.
      **options: see `api.attend_with`.
    """

    def mapped(operands: Operands) -> jax.Array:
        axis = slots_axis(mesh, operands)
        if axis is None:
            return way.attend(operands, **options)
        places = specs(mesh, operands, AXES)

        def local(own: Operands):
            part = jax.lax.axis_index(axis)
            size = own.cache_key.shape[2]
            # slots are numbered within the device, and so are the values compared with them
            own = dataclasses.replace(
                own,
                length=jnp.clip(own.length - part * size, 0, size),
                query_positions=numbered(own, part * size),
                visible=own.visible & (part == 0),  # the block's own keys count once
            )
            return finished(merged(way.find(own, **options), axis), own.sinks)

        with jax.sharding.use_abstract_mesh(mesh):
            return jax.shard_map(local, in_specs=(places,), out_specs=places.queries, check_vma=False)(operands)

    return mapped
