"""Caches with poison where nothing may be read."""

import dataclasses

import jax.numpy as jnp


def spoilt(cache, length, reach):
    """A cache of `length` `[B]` positions with poison in all slots but theirs, and of a ring but those of the last `reach`."""
    keys, values = [], []
    for layer in range(len(cache.key)):
        key, value, held, *_ = cache.layer(layer, length)
        first = jnp.zeros_like(length) if held is None else jnp.maximum(length - reach, 0)
        position = jnp.arange(key.shape[2])[None] if held is None else held
        read = ((position >= first[:, None]) & (position < length[:, None]))[:, None, :, None]
        keys.append(jnp.where(read, key, 1e4))
        values.append(None if value is None else jnp.where(read, value, 1e4))
    return dataclasses.replace(cache, key=tuple(keys), value=tuple(values))
