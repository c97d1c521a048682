"""A kernel under a mesh: each device works on its own rows and kv-heads, and nothing of the cache travels.

Neither Mosaic nor Triton calls are partitioned by the compiler, so the mesh has to be known where they are traced: as JAX's
ambient mesh (`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` inside jit), which decoders with a mesh set.
"""

import functools

import jax

from specjax.sharding.rules import partition

AXES = (
    ("batch", "kv_heads", None, None),  # queries
    ("batch", "kv_heads", None, None),  # key
    ("batch", "kv_heads", None, None),  # value
    ("batch", "kv_heads", None, None),  # cache_key
    ("batch", "kv_heads", None, None),  # cache_value
    ("batch",),  # length
    ("batch", None, None),  # visible
    ("batch", None),  # query_positions
    ("batch", None),  # unseen
    ("batch", "kv_heads", None),  # key_scale
    ("batch", "kv_heads", None),  # value_scale
)
"""Logical axes of the operands of `api.attend_with`."""


def per_device(attend, mesh):
    """`attend` of every device's part of the operands, where the ambient `mesh` (maybe empty) says what that is."""

    @functools.wraps(attend)
    def mapped(*operands):
        if mesh.empty or mesh.size == 1 or mesh.manual_axes:  # one device, or a caller that is mapped already
            return attend(*operands)
        specs = tuple(
            None if x is None else partition(mesh, axes, x.shape, {}) for axes, x in zip(AXES, operands, strict=True)
        )
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.shard_map(attend, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)

    return mapped
