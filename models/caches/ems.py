"""Evict, then merge (EMS, arXiv:2412.08521): a head keeps the tokens that queries attend to, and merges others into
them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.models.caches.base import Layer, Old
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Centres(Pretty):
    """The tokens that a layer keeps, by head.

    Attributes:
      key: `[B, K, C, H]`.
      value: as `key`.
      score: `[B, K, C]` float32, the attention received since a token was added, over all chunks.
      chunks: `[B, K, C]` float32, the number of these chunks.
    """

    key: Array
    value: Array
    score: Array
    chunks: Array


@dataclasses.dataclass(frozen=True)
class EMS(Old):
    """Keeps the `budget` most important of a head's older tokens, and merges or evicts the others.

    A token is merged into the kept token with the most similar key, or evicted if none is similar. Merged keys include
    their rotation by position.

    Importance is the mean of a local and a global value. Local is the attention from the last chunk's queries. Global
    is the attention from all chunks since the token was added, divided by their number, so that early tokens, which
    more queries saw, have no advantage. The paper's way to combine the two is unknown to us, as is its threshold.

    Attributes:
      budget: C.
      threshold: the bound of the cosine of two keys, above which a token is merged; otherwise it is evicted. 1: all are
        evicted; -1: none is.
    """

    about = About(
        "ems", "keeps what queries look at, merges others into their like or evicts them", "arXiv:2412.08521", "lossy"
    )

    budget: int = 256
    threshold: float = 0.6

    def __post_init__(self):
        if (
            min(self.budget, self.chunk) < 1
            or self.budget % self.chunk
            or self.recent < 0
            or not -1 <= self.threshold <= 1
        ):
            raise ValueError(
                f"ems needs a chunk of at least 1, a budget of some chunks, recent >= 0 and threshold in [-1, 1], got {self}"
            )

    @property
    def asks(self):
        return self.chunk

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        zeros = lambda kind_, *more: jnp.zeros((batch, kind.num_key_value_heads, self.budget, *more), kind_)
        return Centres(zeros(dtype, kind.head_dim), zeros(dtype, kind.head_dim), zeros(jnp.float32), zeros(jnp.float32))

    def read(self, body, folded):
        used = jnp.arange(self.budget)[None] < folded[:, None]
        return body.key, body.value, used

    def fold(self, bodies, layers, folded):
        return tuple(self._fold(body, layer, folded) for body, layer in zip(bodies, layers, strict=True))

    def _fold(self, body: Centres, layer: Layer, folded: Array) -> Centres:
        used = jnp.arange(self.budget)[None] < folded[:, None]
        local, ring = layer.received(body.key, used)
        slots = (layer.positions % layer.ring.shape[2])[:, None]
        ring = jnp.take_along_axis(ring, slots, axis=2)
        chunk = Centres(layer.key, layer.value, ring, jnp.ones_like(ring))
        body = dataclasses.replace(body, score=body.score + local, chunks=body.chunks + used[:, None])
        every = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), body, chunk)
        local = jnp.concatenate([local, ring], axis=2)
        there = jnp.concatenate([used, jnp.ones((used.shape[0], self.chunk), bool)], axis=1)[:, None]
        worth = jnp.where(there, (local + every.score / jnp.maximum(every.chunks, 1)) / 2, -1.0)
        order = jnp.argsort(-worth, axis=2)
        kept, rest = jnp.sort(order[..., : self.budget], axis=2), order[..., self.budget :]
        # if there is room for all, the kept ones are the tokens so far and the empty slots after them; the rest are
        # empty
        kept = jnp.where(folded[:, None, None] < self.budget, _behind(folded, self.budget, self.chunk), kept)
        full = (folded >= self.budget)[:, None, None]
        centres, others = (jax.tree.map(lambda x, at=at: _take(x, at), every) for at in (kept, rest))
        return self._merged(centres, others, jnp.broadcast_to(full, rest.shape))

    def _merged(self, centres: Centres, others: Centres, there: Array) -> Centres:
        """The centres after merging the other tokens that are `there` `[B, K, g]` into similar ones."""
        unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True), 1e-9)
        like = jnp.einsum("bkgh,bkch->bkgc", unit(others.key), unit(centres.key))
        into = jax.nn.one_hot(jnp.argmax(like, axis=-1), self.budget)
        goes = there & (jnp.max(like, axis=-1) > self.threshold)
        weight = into * (others.score * goes)[..., None]  # [B, K, g, C]
        brought = weight.sum(axis=2)
        whole = centres.score + brought
        mean = lambda own, other: (
            (own * centres.score[..., None] + jnp.einsum("bkgc,bkgh->bkch", weight, other.astype(jnp.float32)))
            / jnp.maximum(whole, 1e-30)[..., None]
        )
        blend = lambda own, other: jnp.where((brought > 0)[..., None], mean(own, other), own).astype(own.dtype)
        return Centres(blend(centres.key, others.key), blend(centres.value, others.value), whole, centres.chunks)


def _behind(folded: Array, budget: int, chunk: int) -> Array:
    """For a body with room: the indices `[B, 1, C]` of its next tokens in the concatenation of body and chunk; the
    chunk follows the others."""
    at = jnp.arange(budget)[None]
    ours = (at >= folded[:, None]) & (at < folded[:, None] + chunk)
    return jnp.where(ours, budget + at - folded[:, None], at)[:, None]


def _take(x: Array, at: Array) -> Any:
    return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 3)), axis=2)
