"""The cache write for slots split over a mesh: each device writes its own slots, and the cache does not travel.

The written values do travel: if a block's tokens are split, all its keys and values reach every device of the axis.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from specjax.kernels.kv_commit import xla
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import partition

AXES = ("batch", "kv_heads", "slots", None)


def commit(caches, news, src, dst, positions=None):
    """See `api.kv_commit`; XLA's implementation for caches split by the ambient mesh."""
    if positions is not None:  # the slots depend on the ring
        count = (news[0] if src is None else src).shape[1]
        at = {slots: around(dst, count, slots, positions) for slots in {cache.shape[2] for cache in caches}}
        each = zip(caches, news, strict=True)
        return tuple(commit((cache,), (new,), src, at[cache.shape[2]])[0] for cache, new in each)
    mesh = known_mesh()
    axes = [_split(mesh, cache) for cache in caches]
    if not any(axes):
        return _each(xla.commit, caches, news, src, dst)
    return per_device(functools.partial(_each, _commit, axes=axes), caches, news, src, dst)


def per_device(write, caches, news, src, dst):
    """A write function applied to every device's part, according to the ambient mesh."""
    mesh = known_mesh()
    if mesh is None:
        return write(caches, news, src, dst)
    specs = tuple(_spec(mesh, cache) for cache in caches)
    rows = jax.P(specs[0][0])
    given = specs, tuple(jax.P(spec[0], None, spec[1]) for spec in specs), None if src is None else rows, rows
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(write, in_specs=given, out_specs=specs, check_vma=False)
        return mapped(tuple(caches), tuple(news), src, dst)


def around(dst, count, slots, positions):
    """The slots `[B, M]` of a ring for positions, given as starts `[B]` or as `[B, M]`; those to drop are out of
    range."""
    named = dst[:, None] + jnp.arange(count)[None] if dst.ndim == 1 else dst
    inside = (named >= 0) & (named < positions)
    return jnp.where(inside, named % slots, slots)


def by_kernel(kernel, caches, news, src, dst, positions=None):
    """Writes runs by a kernel that drops slots outside its own, on every device's part of caches of one shape.

    Args:
      kernel: `tpu.commit`.
      caches: see `api.kv_commit`, as for the others.
    """
    capacity, axis = caches[0].shape[2], _split(known_mesh(), caches[0])
    count = (news[0] if src is None else src).shape[1]
    if positions is None:
        first = jnp.clip(jnp.where(dst < 0, dst + capacity, dst), 0, capacity - count)
        runs, span = [first], jnp.broadcast_to(jnp.asarray([0, count], jnp.int32), (len(dst), 2))
    else:  # the part beyond the end of a ring is a separate run, which begins before its first slot
        runs = [dst % capacity, dst % capacity - capacity]
        span = jnp.stack([-dst, positions - dst], axis=1).astype(jnp.int32)

    def own(caches, news, src, at):
        dst, span = at
        before = 0 if axis is None else jax.lax.axis_index(axis) * caches[0].shape[2]
        return kernel(caches, news, src, dst - before, span)

    for dst in runs:
        caches = per_device(own, caches, news, src, (dst, span))
    return caches


def part(cache):
    """The shape of a device's part of a cache."""
    mesh = known_mesh()
    return cache.shape if mesh is None else NamedSharding(mesh, _spec(mesh, cache)).shard_shape(cache.shape)


def _spec(mesh, cache):
    return partition(mesh, AXES[: cache.ndim], cache.shape, {})


def _split(mesh, cache):
    """The mesh axis that splits a cache's slots; None if none does."""
    axis = None if mesh is None else _spec(mesh, cache)[2]
    return None if axis is None or mesh.shape[axis] == 1 else axis


def _each(write, caches, news, src, dst, axes=None):
    more = [{}] * len(caches) if axes is None else [{"axis": axis} for axis in axes]
    return tuple(write(cache, new, src, dst, **m) for cache, new, m in zip(caches, news, more, strict=True))


def _commit(cache, new, src, dst, *, axis):
    """A device's slots of one cache (all of them if no `axis` splits it); `dst` names slots of the whole cache."""
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
    """Writes the part within `slots` `[K, S, ...]` of a run that starts at `first`: before them, among them or
    after."""
    size, count = slots.shape[1], new.shape[0] if src is None else src.shape[0]
    width = min(count, size)
    at = jnp.clip(first, 0, size - width)
    index = at - first + jnp.arange(width)  # the run's slot for each place
    inside = (index >= 0) & (index < count)
    index = jnp.clip(index, 0, count - 1)
    fresh = new.at[index if src is None else src[index]].get(mode="clip").swapaxes(0, 1).astype(slots.dtype)
    old = jax.lax.dynamic_slice_in_dim(slots, at, width, axis=1)
    inside = inside.reshape(1, width, *[1] * (slots.ndim - 2))
    return jax.lax.dynamic_update_slice_in_dim(slots, jnp.where(inside, fresh, old), at, axis=1)
