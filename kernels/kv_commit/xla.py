"""The cache write in plain XLA."""

import jax


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
