"""Cascade pruning of tokens (SpAtten, arXiv:2012.09852): a token that a layer drops is dropped by all later layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.models.caches.base import Old
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alive(Pretty):
    """The tokens that a layer keeps, for all of its heads.

    Attributes:
      key: `[B, K, C, H]`.
      value: as `key`.
      positions: `[B, C]` int32; -1 for an empty slot.
      score: `[B, C]` float32, the attention received from all queries, summed over heads, in this and all lower layers.
        A token that leaves the exact ones after the prompt begins with the last chunk's.
    """

    key: Array
    value: Array
    positions: Array
    score: Array


@dataclasses.dataclass(frozen=True)
class SpAtten(Old):
    """Keeps the most important older tokens, fewer in later layers.

    The first layer keeps `important` tokens, the last one `last`, and layers between in proportion. A layer keeps a
    subset of the tokens of the layer below. A token's importance is the attention that it has received so far, summed
    over heads and over layers up to this one. The first `start` tokens are always kept.

    This implements only the pruning of tokens. The pruning of heads and values, and the quantisation in two parts,
    belong to the paper's accelerator.

    Attributes:
      important: C of the first layer.
      last: C of the last layer.
      start: the number of tokens at the beginning of a text that are always kept.
    """

    about = About(
        "spatten", "keeps what queries look at, fewer tokens the higher a layer is", "arXiv:2012.09852", "lossy"
    )

    important: int = 256
    last: int = 128
    start: int = 4

    def __post_init__(self):
        if not 1 <= self.chunk <= self.last <= self.important or not 0 <= self.start <= self.last or self.recent < 0:
            raise ValueError(
                f"spatten needs 1 <= chunk <= last <= important, start in [0, last] and recent >= 0, got {self}"
            )

    @property
    def asks(self):
        return self.chunk

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        layers = config.num_hidden_layers
        size = round(self.important + (self.last - self.important) * layer / max(layers - 1, 1))
        zeros = lambda: jnp.zeros((batch, kind.num_key_value_heads, size, kind.head_dim), dtype)
        empty = jnp.full((batch, size), -1, jnp.int32)
        return Alive(zeros(), zeros(), empty, jnp.zeros((batch, size), jnp.float32))

    def read(self, body, folded):
        return body.key, body.value, body.positions >= 0

    def begin(self, bodies, prompts, folded, lengths):
        kept, alive, brought = [], None, 0.0
        for body, prompt in zip(bodies, prompts, strict=True):
            size, slots = body.positions.shape[1], prompt.key.shape[2]
            at = jnp.arange(slots)[None]
            # a layer drops what the layer below has dropped, and adds up the attention that the others received there
            alive = at < folded[:, None] if alive is None else alive
            assert prompt.every is not None
            score = jnp.where(alive, prompt.every.sum(axis=1) + brought, 0.0)
            worth = jnp.where(alive, jnp.where(at < self.start, jnp.inf, score), -jnp.inf)
            places = jnp.sort(jax.lax.top_k(worth, min(size, slots))[1], axis=1)
            take = lambda x, places=places: jnp.take_along_axis(x, places, axis=1)
            pad = lambda x, fill, axis, more=size - places.shape[1]: jnp.pad(
                x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill
            )
            here = take(alive)
            keys = (jnp.take_along_axis(x, places[:, None, :, None], axis=2) for x in (prompt.key, prompt.value))
            key, value = (pad(x, 0, 2) for x in keys)
            kept.append(Alive(key, value, pad(jnp.where(here, places, -1), -1, 1), pad(take(score), 0, 1)))
            alive = jax.vmap(lambda places, here, n=slots: jnp.zeros((n,), bool).at[places].set(here))(places, here)
            brought = score
        return tuple(kept)

    def fold(self, bodies, layers, folded):
        kept, below, brought = [], None, None
        for body, layer in zip(bodies, layers, strict=True):
            weights = layer.attention(body.key, body.positions >= 0)
            positions = jnp.concatenate([body.positions, layer.positions], axis=1)
            fresh = layer.given(weights).sum(axis=1)
            # a token's attention in this chunk, including the layers below, all of which keep it
            same = None if below is None else _same(positions, below.positions)
            fresh = fresh if same is None else fresh + jnp.einsum("bij,bj->bi", same, brought)
            score = jnp.pad(body.score, ((0, 0), (0, self.chunk))) + fresh
            alive = positions >= 0 if same is None else (positions >= 0) & (same.sum(axis=2) > 0)
            worth = jnp.where(alive, jnp.where(positions < self.start, jnp.inf, score), -jnp.inf)
            worth, at = jax.lax.top_k(worth, body.positions.shape[1])
            order = jnp.argsort(at, axis=1)  # in the original order
            worth, at = jnp.take_along_axis(worth, order, axis=1), jnp.take_along_axis(at, order, axis=1)
            take = lambda x, at=at: jnp.take_along_axis(x, at, axis=1)
            every = [jnp.concatenate(pair, axis=2) for pair in ((body.key, layer.key), (body.value, layer.value))]
            key, value = (jnp.take_along_axis(x, at[:, None, :, None], axis=2) for x in every)
            held = jnp.where(worth == -jnp.inf, -1, take(positions))
            below, brought = Alive(key, value, held, take(score)), take(fresh)
            kept.append(below)
        return tuple(kept)


def _same(a: Array, b: Array) -> Any:
    """Whether positions `[B, i]` and `[B, j]` are equal, `[B, i, j]` float32; empty slots equal nothing."""
    return ((a[:, :, None] == b[:, None, :]) & (a >= 0)[:, :, None]).astype(jnp.float32)
