"""The cache write where a mesh splits a cache's slots: a device writes those that it holds, and nothing of the cache travels.

What is written does travel: where a block's tokens are split, all its keys and values reach every device of the axis.
"""

import functools

import jax
import jax.numpy as jnp

from specjax.kernels.kv_commit import xla
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import partition

AXES = ("batch", "kv_heads", "slots", None)


def commit(caches, news, src, dst):
    """See `api.kv_commit`, for caches that lie as the ambient mesh says."""
    mesh = known_mesh()
    specs = () if mesh is None else tuple(partition(mesh, AXES[: cache.ndim], cache.shape, {}) for cache in caches)
    axes = [spec[2] for spec in specs]
    if mesh is None or all(axis is None or mesh.shape[axis] == 1 for axis in axes):
        return _each(xla.commit, caches, news, src, dst)
    write = functools.partial(_each, _commit, axes=axes)
    rows = jax.P(specs[0][0])
    given = specs, tuple(jax.P(spec[0], None, spec[1]) for spec in specs), None if src is None else rows, rows
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.shard_map(write, in_specs=given, out_specs=specs, check_vma=False)(caches, news, src, dst)


def _each(write, caches, news, src, dst, axes=None):
    more = [{}] * len(caches) if axes is None else [{"axis": axis} for axis in axes]
    return tuple(write(cache, new, src, dst, **m) for cache, new, m in zip(caches, news, more, strict=True))


def _commit(cache, new, src, dst, *, axis):
    """A device's slots of one cache, all of them where no `axis` splits it; `dst` names slots of the whole."""
    if axis is None:
        return xla.commit(cache, new, src, dst)
    size = cache.shape[2]
    capacity = size * jax.lax.axis_size(axis)
    offset = jax.lax.axis_index(axis) * size
    dst = jnp.where(dst < 0, dst + capacity, dst)
    if dst.ndim == 2:
        here = dst - offset
        return xla.commit(cache, new, src, jnp.where(here < 0, size, here))
    count = new.shape[1] if src is None else src.shape[1]
    first = jnp.clip(dst, 0, capacity - count) - offset
    return jax.vmap(_run, in_axes=(0, 0, None if src is None else 0, 0))(cache, new, src, first)


def _run(slots, new, src, first):
    """Writes what lies in `slots` `[K, S, ...]` of a run that starts at `first`: before them, among them or behind."""
    size, count = slots.shape[1], new.shape[0] if src is None else src.shape[0]
    width = min(count, size)
    at = jnp.clip(first, 0, size - width)
    index = at - first + jnp.arange(width)  # which of the run's slots goes where
    inside = (index >= 0) & (index < count)
    index = jnp.clip(index, 0, count - 1)
    fresh = new.at[index if src is None else src[index]].get(mode="clip").swapaxes(0, 1).astype(slots.dtype)
    old = jax.lax.dynamic_slice_in_dim(slots, at, width, axis=1)
    inside = inside.reshape(1, width, *[1] * (slots.ndim - 2))
    return jax.lax.dynamic_update_slice_in_dim(slots, jnp.where(inside, fresh, old), at, axis=1)
