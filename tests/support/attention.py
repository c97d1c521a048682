"""Operands of tree attention, for its tests."""

import jax.numpy as jnp
import numpy as np

B, T, K, G, H = 3, 5, 2, 2, 16


def world(capacity, lengths, past=0, dtype=jnp.float32, seed=0, block=T, heads=K, group=G, width=H):
    """Operands with finite garbage beyond the lengths, and the options that place them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    operands = (draw(B, block, heads * group, width), *(draw(B, past + block, heads, width) for _ in range(2)))
    length = jnp.asarray(lengths, jnp.int32)
    beyond = (jnp.arange(capacity)[None] >= length[:, None])[:, None, :, None]
    slots = lambda: draw(B, heads, capacity, width)
    cache = (jnp.where(beyond, slots() * 1e30, slots() * 2) for _ in range(2))
    positions = length[:, None] + jnp.arange(past + block)[None]
    visible = jnp.asarray(rng.random((B, block, past + block)) < 0.6)
    visible = visible | jnp.eye(block, past + block, past, dtype=bool)[None]
    return (*operands, *cache, length), {
        "visible": visible, "query_positions": positions[:, past:], "key_positions": positions,
    }  # fmt: skip


def holes(capacity):
    return jnp.asarray(np.random.default_rng(1).random((B, capacity)) < 0.4)


def sinks(heads=K * G):
    """Far below the scores, among them, and far above."""
    return jnp.asarray(np.random.default_rng(2).normal(size=heads) * 9, jnp.float32)


def distances(heads=K * G, reach=20):
    """Different on both sides, and as large as scores."""
    return jnp.asarray(np.random.default_rng(3).normal(size=(heads, 2 * reach + 1)) * 3, jnp.float32)


def quantised(cache, dtype):
    """A cache in 8 bits, and its scale for every slot and head; the garbage beyond the lengths is garbage still."""
    top = 127 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(cache), axis=-1) / top
    return (cache / scale[..., None]).astype(dtype), scale


def ring(capacity, lengths):
    """What the slots of a ring hold after texts of these lengths: the last positions, the newest at its length's
    slot."""
    last = np.asarray(lengths)[:, None] - 1
    return jnp.asarray(last - (last - np.arange(capacity)[None]) % capacity, jnp.int32)
