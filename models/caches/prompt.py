"""The cache in which a prompt is read, of a model whose cache forgets.

It holds the whole prompt. So a policy chooses what to keep when all of the prompt is known, the question at its end
included, as the published methods do.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Float
from specjax.kernels.kv_commit import kv_commit
from specjax.models.caches.base import OldCache, Ring, Whole, attention, held_after
from specjax.models.kv import KVDelta, Slots
from specjax.pretty import Pretty

PART = 16
"""How many queries of a block are weighed together, so that their scores over a long prompt need little memory."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Read(Pretty):
    """What was read of one layer; slot s holds position s.

    Attributes:
      key: `[B, K, S, H]`.
      value: as `key`.
      every: `[B, K, S]` float32, see `Whole`; None if the policy uses no queries, or for a layer with a window.
      query: `[B, K, W, G * H]`, the last scaled queries, position p in slot p mod W; None as `every`.
    """

    key: Float[Array, "B K S H"]
    value: Array
    every: Float[Array, "B K S"] | None = None
    query: Float[Array, "B K W G*H"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptCache(Pretty):
    """The cache of rows whose prompts are being read.

    Attributes:
      layers: a tuple over the layers with their own keys and values.
      after: the empty cache that `folded` fills.
    """

    layers: tuple[Read, ...]
    after: OldCache

    @classmethod
    def empty(cls, after: OldCache, capacity: int) -> "PromptCache":
        """An empty cache for prompts of up to `capacity` tokens, which then go into `after`."""
        layers = []
        for ring in after.rings:
            key = jnp.zeros((*ring.key.shape[:2], capacity, ring.key.shape[3]), ring.key.dtype)
            query = None if ring.query is None else jnp.zeros_like(ring.query[:, :, : after.policy.asks])
            every = None if query is None else jnp.zeros(key.shape[:3], jnp.float32)
            layers.append(Read(key, jnp.zeros_like(key), every, query))
        return cls(tuple(layers), after)

    def layer(self, index: int, length: Array) -> Slots:
        """The slots of a layer."""
        one = self.layers[index]
        return Slots(one.key, one.value, asks=self.after.policy.asks > 0)

    def commit(self, delta: KVDelta, src: Array | None, dst: Array, counts: Array | None) -> "PromptCache":
        """See `specjax.lm.LM.commit`; for whole blocks in runs only.

        Raises:
          ValueError: for some of a block's slots, or if slots are named.
        """
        if dst.ndim != 1 or src is not None:
            raise ValueError("the cache in which a prompt is read is written in runs of whole blocks")
        old, structure = jax.tree.flatten([(one.key, one.value) for one in self.layers])
        new = jax.tree.leaves(list(zip(delta.key, delta.value, strict=True)))
        written = jax.tree.unflatten(structure, kv_commit(old, new, None, dst, positions=None))
        steps = jnp.arange(delta.positions.shape[1])[None]
        positions = dst[:, None] + steps
        real = jnp.ones(positions.shape, bool) if counts is None else steps < counts[:, None]
        layers = []
        for i, (one, (key, value)) in enumerate(zip(self.layers, written, strict=True)):
            if one.every is None or one.query is None:
                layers.append(Read(key, value))
                continue
            query = delta.query[i]
            every = one.every + _summed(query, key, positions, real)
            layers.append(Read(key, value, every, _newest(one.query, query, positions, real)))
        return dataclasses.replace(self, layers=tuple(layers))

    def axes(self) -> "PromptCache":
        """Logical axis names of every leaf: rows, heads and, as in a whole cache, slots are split."""
        whole, part = ("batch", "kv_heads", "slots", None), ("batch", "kv_heads", None, None)
        others = [jax.tree.map(lambda x: part[: x.ndim], one) for one in self.layers]
        layers = (dataclasses.replace(one, key=whole, value=whole) for one in others)
        return PromptCache(tuple(layers), self.after.axes())

    def folded(self, length: Array) -> OldCache:
        """The cache after `length` `[B]` tokens were read: the newest in rings, the others in bodies."""
        policy, after = self.after.policy, self.after
        folded = jnp.maximum(length - policy.recent, 0) // policy.chunk * policy.chunk
        slots = after.rings[0].key.shape[2]
        held = held_after(slots, length)
        take = lambda x, at: jnp.take_along_axis(x, at[:, None, :, None], axis=2)
        rings, prompts = [], []
        for one, body in zip(self.layers, after.bodies, strict=True):
            at = jnp.clip(held, 0, one.key.shape[2] - 1)
            query = None if one.query is None else take(one.query, held % policy.asks)
            rings.append(Ring(take(one.key, at), take(one.value, at), query))
            if body is not None:
                prompts.append(_whole(one, length))
        empty = tuple(body for body in after.bodies if body is not None)
        left = iter(policy.begin(empty, tuple(prompts), folded, length))
        bodies = tuple(None if body is None else next(left) for body in after.bodies)
        return dataclasses.replace(after, rings=tuple(rings), bodies=bodies, folded=folded, asked=length)


def _by_head(query: Array, width: int) -> Array:
    """Queries `[B, T, K, G * H]` as `[B, K, T, G, H]`."""
    return query.reshape(*query.shape[:3], -1, width).swapaxes(1, 2)


def _summed(query: Array, key: Array, positions: Array, real: Array) -> Array:
    """The attention `[B, K, S]` that slots receive from a block's `real` `[B, T]` queries `[B, T, K, G * H]`."""
    size = positions.shape[1]
    part = min(PART, size)

    def parts(x):
        x = jnp.pad(x, ((0, 0), (0, -size % part), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, part, *x.shape[2:]), 1, 0)

    def add(total, one):
        query, positions, real = one
        seen = jnp.arange(key.shape[2])[None, None] <= positions[:, :, None]
        weights = attention(_by_head(query, key.shape[3]), key, seen)
        return total + jnp.where(real[:, None, :, None], weights, 0.0).sum(axis=2), None

    zero = jnp.zeros(key.shape[:3], jnp.float32)
    return jax.lax.scan(add, zero, tuple(map(parts, (query, positions, real))))[0]


def _newest(old: Array, query: Array, positions: Array, real: Array) -> Array:
    """The ring of queries `[B, K, W, G * H]` after those of a block."""
    window = old.shape[2]
    last = jnp.max(jnp.where(real, positions, -1), axis=1, keepdims=True)
    at = jnp.where(real & (positions > last - window), positions % window, window)
    new = query.swapaxes(1, 2).astype(old.dtype)
    return jax.vmap(lambda old, new, at: old.at[:, at].set(new, mode="drop"))(old, new, at)


def _whole(one: Read, length: Array) -> Whole:
    """What a policy is given of a layer, with the mean attention of the last queries to its slots."""
    if one.query is None:
        return Whole(one.key, one.value)
    held = held_after(one.query.shape[2], length)
    query = one.query.reshape(*one.query.shape[:3], -1, one.key.shape[3])
    seen = jnp.arange(one.key.shape[2])[None, None] <= held[:, :, None]
    weights = jnp.where((held >= 0)[:, None, :, None], attention(query, one.key, seen), 0.0)
    last = weights.sum(axis=2) / jnp.maximum(jnp.sum(held >= 0, axis=1), 1)[:, None, None]
    return Whole(one.key, one.value, one.every, last, query, held)
