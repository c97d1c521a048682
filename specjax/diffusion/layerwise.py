"""dLLM-Cache's partial refresh: each layer recomputes the positions whose values moved most (arXiv:2506.06295).

A layer's values are cheap: every pass computes them for all of the new text, and compares them with the earlier ones.
The layer recomputes the positions that are least similar; for the others it keeps its keys and its last addition to the
residual stream. In the shape descriptions `L` denotes the canvas, `E` the model width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.cache.base import positions_of
from specjax.diffusion.unmask.base import ranks
from specjax.lm import Block
from specjax.models.kv import KVCache
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layered(Pretty):
    """What is kept between passes.

    Attributes:
      kv: keys and values of every position.
      added: a tuple over layers of `[B, L, E]`, the layer's addition to the residual stream when it was last computed.
    """

    kv: KVCache
    added: tuple[Array, ...]


def begin(target: Any, weights: Any, batch: int, capacity: int, dtype: Any) -> Layered:
    """An empty `Layered`."""
    kv = target.init_cache(batch, capacity, dtype)
    one = jnp.zeros((1, 1), jnp.int32)
    stream = lambda weights: target.layers(weights, target.embed(weights, one), 0, 1, Block(one, one, one[0]), None)[0]
    out = jax.eval_shape(stream, weights)  # layers may sum in another type than the embeddings'
    zeros = lambda: jnp.zeros((batch, capacity, out.shape[-1]), out.dtype)
    return Layered(kv, tuple(zeros() for _ in range(target.num_layers)))


def read_by_layer(
    target: Any, weights: Any, kept: Layered, tokens: Array, must: Array, new: Array, share: float, seen: Array
) -> tuple[Array, Layered]:
    """Features `[B, L, E]` of the new text (and of what must be computed), and what is kept.

    Args:
      target: the model, which must have `values`.
      weights: its parameters.
      kept: from the passes before.
      tokens: `[B, L]` int32.
      must: `[B, L]` bool, the positions that every layer computes.
      new: `[B, L]` bool, the new text.
      share: of the new text, how much a layer chooses, rounded down.
      seen: `[B]` int32, the end of the positions that a pass sees.
    """
    size = tokens.shape[1]
    count = jnp.floor(share * new.sum(axis=1) + 1e-4).astype(jnp.int32)
    narrow = max(int(share * size + 1e-4), 1)

    def through(width):
        h, keys, values, added = target.embed(weights, tokens).astype(kept.added[0].dtype), [], [], []
        for layer in range(target.num_layers):
            fresh = target.values(weights, h, layer).astype(kept.kv.value[layer].dtype)
            near = _similarity(fresh, kept.kv.value[layer].swapaxes(1, 2))
            value = jnp.where(new[:, None, :, None], fresh.swapaxes(1, 2), kept.kv.value[layer])
            chosen = must | (ranks(-near, new) < count[:, None])
            at = positions_of(chosen, width)
            clipped = jnp.minimum(at, size - 1)
            visible = jnp.broadcast_to(((at < size) & (at < seen[:, None]))[:, None], (*at.shape, width))
            block = Block(
                jnp.take_along_axis(tokens, clipped, axis=1), clipped, seen, visible, unseen=chosen, causal=False
            )
            inputs = jnp.take_along_axis(h, clipped[:, :, None], axis=1)
            seen_by = KVCache((kept.kv.key[layer],) * (layer + 1), (value,) * (layer + 1))  # a layer reads only its own
            outputs, delta = target.layers(weights, inputs, layer, layer + 1, block, seen_by)
            written = target.commit(KVCache((kept.kv.key[layer],), (value,)), delta, None, at)
            put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            added.append(put(kept.added[layer], at, outputs - inputs))
            h = h + added[-1]
            keys.append(written.key[0])
            values.append(written.value[0])
        return target.norm(weights, h), Layered(KVCache(tuple(keys), tuple(values)), tuple(added))

    wide = jnp.max(must.sum(axis=1) + jnp.where(jnp.all(must >= new, axis=1), 0, count)) > narrow
    return jax.lax.cond(wide, lambda: through(size), lambda: through(narrow))


def _similarity(a, b):
    """Cosines `[B, L]` of values `[B, L, K, H]`. They are coarse, so that unchanged positions tie, whatever computed them."""
    a, b = (x.reshape(*x.shape[:2], -1).astype(jnp.float32) for x in (a, b))
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.round(jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-8), 4)


def axes_of(target: Any, kept: Layered) -> Layered:
    """Logical axis names of every leaf."""
    return Layered(target.cache_axes(kept.kv), jax.tree.map(lambda _: ("batch", "slots", None), kept.added))
