"""Tree attention under a mesh: each device works on its own rows, kv-heads and cache slots, and nothing of the cache travels.

Neither Mosaic nor Triton calls are partitioned by the compiler, so the mesh has to be known where they are traced: as JAX's
ambient mesh (`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` inside jit), which decoders with a mesh set.

Where the slots are split, all queries meet every part of the prefix where it lies, and what they find there is put together by
its log-sum-exps, as Flash-Decoding (Dao et al. 2023) does on one GPU: messages are as long as the queries, not as the cache.
"""

import functools

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import finished, merged
from specjax.sharding.ambient import says_nothing
from specjax.sharding.rules import partition

AXES = (
    ("batch", "kv_heads", None, None),  # queries
    ("batch", "kv_heads", None, None),  # key
    ("batch", "kv_heads", None, None),  # value
    ("batch", "kv_heads", "slots", None),  # cache_key
    ("batch", "kv_heads", "slots", None),  # cache_value
    ("batch",),  # length
    ("batch", None, None),  # visible
    ("batch", None),  # query_positions
    ("batch", "slots"),  # unseen
    ("batch", "kv_heads", "slots"),  # key_scale
    ("batch", "kv_heads", "slots"),  # value_scale
)
"""Logical axes of the operands of `api.attend_with`."""


CACHE = 3  # where cache_key stands


def _specs(mesh, operands):
    return tuple(
        None if x is None else partition(mesh, axes, x.shape, {}) for axes, x in zip(AXES, operands, strict=True)
    )


def slots_axis(mesh, operands):
    """The mesh axis over which the cache's slots lie split; None where they do not."""
    if says_nothing(mesh) or operands[CACHE] is None:
        return None
    axis = partition(mesh, AXES[CACHE], operands[CACHE].shape, {})[2]
    return None if axis is None or mesh.shape[axis] == 1 else axis


def per_device(way, mesh, **options):
    """A kernel, as a function of every device's part of the operands, where the ambient `mesh` (maybe empty) says what that is.

    Args:
      way: a module that has `attend`, of operands and `options`.
      mesh: maybe empty.
      **options: see `api.attend_with`.
    """
    attend = functools.partial(way.attend, **options)

    def mapped(*operands):
        if slots_axis(mesh, operands):
            return over_slots(way, mesh, **options)(*operands)
        if says_nothing(mesh):  # one device, or a caller that is mapped already
            return attend(*operands)
        specs = _specs(mesh, operands)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.shard_map(attend, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)

    return mapped


def over_slots(way, mesh, **options):
    """An implementation over split slots, where there are any; else its `attend`, for the compiler to partition.

    Args:
      way: a module that has `attend` and `find`, of operands and `options`.
      mesh: maybe empty.
      **options: see `api.attend_with`.
    """

    def mapped(*operands):
        axis = slots_axis(mesh, operands)
        if axis is None:
            return way.attend(*operands, **options)
        specs = _specs(mesh, operands)

        def local(queries, key, value, cache_key, cache_value, length, visible, query_positions, *rest):
            part = jax.lax.axis_index(axis)
            size = cache_key.shape[2]
            # a slot is one of the device's own numbering, and so is what it is compared with
            length = jnp.clip(length - part * size, 0, size)
            query_positions = None if query_positions is None else query_positions - part * size
            visible = visible & (part == 0)  # the block's own keys count once
            found = way.find(
                queries, key, value, cache_key, cache_value, length, visible, query_positions, *rest, **options
            )
            return finished(merged(found, axis))

        with jax.sharding.use_abstract_mesh(mesh):
            return jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)

    return mapped
