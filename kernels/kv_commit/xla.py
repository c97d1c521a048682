"""The cache write in plain XLA."""

import jax
import jax.numpy as jnp

SHORT = 64
"""The longest run for `laid_over`."""


def commit(cache, new, src, dst):
    """One cache of `api.kv_commit`."""

    def row(slots, new, src, dst):  # [K, S, ...], [T, K, ...]
        if src is not None:
            new = new.at[src].get(mode="clip")
        new = new.swapaxes(0, 1).astype(slots.dtype)
        if dst.ndim == 0:
            return jax.lax.dynamic_update_slice(slots, new, (0, dst, *[0] * (slots.ndim - 2)))
        return slots.at[:, dst].set(new, mode="drop")

    return jax.vmap(row, in_axes=(0, 0, None if src is None else 0, 0))(cache, new, src, dst)


def laid_over(rows, new, start, positions=None):
    """Writes runs of `new` `[B, ..., M]` into `rows` `[B, ..., S]` of single numbers, from `start` `[B]` on, not
    negative.

    For rings, `start` is a position, and positions out of `positions` are dropped.

    Every number is compared with every place, which takes a TPU the time of one pass over them. Otherwise a TPU would
    write the rows one after the other, each waiting for the previous one.
    """
    count, slots = new.shape[-1], rows.shape[-1]
    start = start.reshape(-1, *[1] * (rows.ndim - 1))
    place = jax.lax.broadcasted_iota(jnp.int32, (1,) * (rows.ndim - 1) + (slots,), rows.ndim - 1)
    if positions is None:
        own = place - jnp.clip(start, 0, slots - count)
    else:
        own = (place - start) % slots
        own = jnp.where((start + own >= 0) & (start + own < positions), own, slots)
    for m in range(count):
        rows = jnp.where(own == m, new[..., m : m + 1], rows)
    return rows
