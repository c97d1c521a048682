"""Evict, then merge (EMS, arXiv:2412.08521): a head keeps the tokens that queries attend to, and merges others into
them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.models.caches.base import Layer, Old, Whole, kept_layers
from specjax.pretty import Pretty

Array = jax.Array
PART = 256
"""How many keys are compared with the centres together."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Centres(Pretty):
    """The tokens that a layer keeps, by head.

    Attributes:
      key: `[B, K, C, H]`.
      value: as `key`.
      score: `[B, K, C]` float32, the attention received from all queries so far.
    """

    key: Array
    value: Array
    score: Array


@dataclasses.dataclass(frozen=True)
class EMS(Old):
    """Keeps the `budget` most important of a head's older tokens, and merges or evicts the others.

    A token is merged into the kept token with the most similar key, or evicted if none is similar. Merged keys include
    their rotation by position.

    Importance is the larger of a local and a global value, as in the paper. Both are means over queries of the attention
    that a token receives: the local one over the last `chunk` queries, the global one over all of them. A token that
    leaves the exact ones after the prompt begins its global value with the attention of the last chunk.

    Importance is averaged over `pool` neighbours before the best are taken, as SnapKV does (arXiv:2404.14469): a fact
    stands in several tokens, and a question looks at one of them. The paper's threshold is unknown to us, and whether it
    pools.

    Attributes:
      budget: C.
      budgets: C of each layer that keeps older tokens, instead of `budget`; empty: it is the same for all.
      threshold: the bound of the cosine of two keys, above which a token is merged; otherwise it is evicted. 1: all are
        evicted; -1: none is.
      pool: how many neighbouring tokens share their importance, an odd number; 1: none.
    """

    about = About(
        "ems", "keeps what queries look at, merges others into their like or evicts them", "arXiv:2412.08521", "lossy"
    )

    budget: int = 256
    threshold: float = 0.6
    pool: int = 5
    budgets: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = self.budgets or (self.budget,)
        if (
            min(*sizes, self.chunk) < 1
            or any(size % self.chunk for size in sizes)
            or self.recent < 0
            or not -1 <= self.threshold <= 1
            or self.pool < 1
            or self.pool % 2 == 0
        ):
            raise ValueError(
                "ems needs a chunk of at least 1, a budget of some chunks, recent >= 0, threshold in [-1, 1] and an odd pool, "
                f"got {self}"
            )

    @property
    def asks(self):
        return self.chunk

    def check(self, config):
        if self.budgets and len(self.budgets) != (count := len(kept_layers(config))):
            raise ValueError(
                f"ems: budgets has {len(self.budgets)} numbers, and {count} layers of the model keep older tokens: give one "
                "for each"
            )

    def init(self, config, layer, batch, capacity, dtype):
        kind = config.attention(layer)
        size = self.budgets[kept_layers(config).index(layer)] if self.budgets else self.budget
        zeros = lambda kind_, *more: jnp.zeros((batch, kind.num_key_value_heads, size, *more), kind_)
        return Centres(zeros(dtype, kind.head_dim), zeros(dtype, kind.head_dim), zeros(jnp.float32))

    def read(self, body, folded):
        return body.key, body.value, _used(body, folded)

    def begin(self, bodies, prompts, folded, lengths):
        sizes = (body.key.shape[2] for body in bodies)
        return tuple(self._begin(*own, folded, lengths) for own in zip(sizes, prompts, strict=True))

    def _begin(self, size: int, prompt: Whole, folded: Array, lengths: Array) -> Centres:
        assert prompt.every is not None and prompt.last is not None
        room = max(size - prompt.key.shape[2], 0)
        pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), *[(0, 0)] * (x.ndim - 3)))
        every = jax.tree.map(pad, Centres(prompt.key, prompt.value, prompt.every))
        there = jnp.arange(every.key.shape[2])[None] < folded[:, None]
        return self._kept(size, every, importance(every.score, pad(prompt.last), lengths), there)

    def fold(self, bodies, layers, folded):
        return tuple(self._fold(body, layer, folded) for body, layer in zip(bodies, layers, strict=True))

    def _fold(self, body: Centres, layer: Layer, folded: Array) -> Centres:
        size, used = body.key.shape[2], _used(body, folded)
        weights = layer.attention(body.key, used)
        chunk = Centres(layer.key, layer.value, jnp.zeros_like(weights[:, :, 0, size:]))
        every = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), body, chunk)
        every = dataclasses.replace(every, score=every.score + layer.given(weights))
        there = jnp.concatenate([used, jnp.ones((used.shape[0], self.chunk), bool)], axis=1)
        queries = folded + self.recent + self.chunk
        return self._kept(size, every, importance(every.score, weights.mean(axis=2), queries), there)

    def _kept(self, keeps: int, every: Centres, worth: Array, there: Array) -> Centres:
        """The `keeps` most important of the tokens `[B, K, S]` that are `there` `[B, S]`, in their order, with others merged
        into them."""
        size, there = worth.shape[2], jnp.broadcast_to(there[:, None], worth.shape)
        near = (1, 1, self.pool), (1, 1, 1), "SAME"
        worth = jax.lax.reduce_window(jnp.where(there, worth, 0.0), 0.0, jax.lax.add, *near) / self.pool
        at = jax.lax.top_k(jnp.where(there, worth, -1.0), keeps)[1]
        at = (
            jnp.sort(jnp.where(jnp.take_along_axis(there, at, axis=2), at, at + size), axis=2) % size
        )  # empty ones last
        out = jax.vmap(jax.vmap(lambda there, at: there.at[at].set(False)))(there, at)
        return self._merged(jax.tree.map(lambda x: _take(x, at), every), every, out)

    def _merged(self, centres: Centres, every: Centres, out: Array) -> Centres:
        """The centres after merging the other tokens, which are `out` `[B, K, S]`, into similar ones."""
        like, into = _nearest(every.key, centres.key)
        weight = jnp.where(out & (like > self.threshold), every.score, 0.0)  # [B, K, S]
        summed = functools.partial(_summed, into=into, size=centres.key.shape[2])
        brought = summed(weight)
        whole = centres.score + brought
        mean = lambda own, other: (
            (own * centres.score[..., None] + summed(weight[..., None] * other.astype(jnp.float32)))
            / jnp.maximum(whole, 1e-30)[..., None]
        )
        blend = lambda own, other: jnp.where((brought > 0)[..., None], mean(own, other), own).astype(own.dtype)
        return Centres(blend(centres.key, every.key), blend(centres.value, every.value), whole)


def _used(body: Centres, folded: Array) -> Array:
    """The slots `[B, C]` of a body that hold a token."""
    return jnp.arange(body.key.shape[2])[None] < folded[:, None]


def importance(every: Array, last: Array, queries: Array) -> Array:
    """The importance `[B, K, S]` of tokens: the larger of two means of the attention that they received.

    Args:
      every: `[B, K, S]`, from all queries, summed.
      last: `[B, K, S]`, from the last ones, a mean.
      queries: `[B]`, how many queries there were.

    >>> rows = jnp.asarray([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.7, 0.1, 0.2, 0], [0.1, 0.1, 0.3, 0.5]])
    >>> found = importance(rows.sum(0)[None, None], rows[-2:].mean(0)[None, None], jnp.asarray([4]))[0, 0]
    >>> [round(share, 3) for share in found.tolist()]
    [0.575, 0.175, 0.25, 0.25]
    """
    return jnp.maximum(every / jnp.maximum(queries, 1)[:, None, None], last)


def _nearest(key: Array, centres: Array) -> tuple[Array, Array]:
    """The cosine `[B, K, S]` of keys `[B, K, S, H]` with the most similar of centres `[B, K, C, H]`, and which one that is.

    Keys are compared `PART` at a time, so that `[B, K, S, C]` cosines of a long prompt need never be there together.
    """
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True), 1e-9)
    centres = unit(centres)

    def best(part):
        like = jnp.einsum("bksh,bkch->bksc", unit(part), centres)
        return like.max(axis=-1), jnp.argmax(like, axis=-1)

    size = key.shape[2]
    if size <= PART:
        return best(key)
    padded = jnp.pad(key, ((0, 0), (0, 0), (0, -size % PART), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(*key.shape[:2], -1, PART, key.shape[3]), 2, 0)
    joined = lambda x: jnp.moveaxis(x, 0, 2).reshape(*key.shape[:2], -1)[..., :size]
    like, into = jax.lax.map(best, parts)
    return joined(like), joined(into)


def _summed(x: Array, into: Array, size: int) -> Array:
    """Sums `[B, K, size, ...]` of entries `[B, K, S, ...]` by where they go, `into` `[B, K, S]`."""
    one = lambda x, into: jnp.zeros((size, *x.shape[1:]), x.dtype).at[into].add(x)
    return jax.vmap(jax.vmap(one))(x, into)


def _take(x: Array, at: Array) -> Any:
    return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 3)), axis=2)
