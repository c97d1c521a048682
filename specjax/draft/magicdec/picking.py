"""Some slots of a cache as a cache of their own, and which slots a prompt's last queries attend to.

In the shape descriptions `B` denotes rows, `K` kv-heads, `G` query heads of each, `H` their width, `S` slots of the cache,
`M` those that are picked, `W` queries.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import kv_bits
from specjax.models.kv import KVCache, KVDelta, Slots
from specjax.models.ropes import RopeConfig, rope_frequencies, rotate, tables_of
from specjax.pretty import Pretty

Array = jax.Array

WINDOW = 32
"""How many of a prompt's last tokens ask, and are kept (the published code's)."""
POOL = 5
"""Over how many slots attention is averaged before the best are taken."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Picked(Pretty):
    """Some slots of a cache.

    Attributes:
      slots: a tuple over the layers with keys of their own.
    """

    slots: tuple[Slots, ...]

    def layer(self, index: int, length: Array) -> Slots:
        """What a layer's queries see; the slots themselves say which are used."""
        return self.slots[index]

    def after(self, delta: KVDelta) -> "Picked":
        """With a block's keys and values after the others, all of them seen."""
        out = []
        for own, key, value in zip(self.slots, delta.key, delta.value, strict=True):
            add = lambda old, new, kind=own.key.dtype: jnp.concatenate(
                [old, kv_bits.read(new, kind).swapaxes(1, 2).astype(old.dtype)], axis=2
            )
            assert own.unseen is not None
            unseen = jnp.pad(own.unseen, ((0, 0), (0, key.shape[1])))
            positions = None if own.positions is None else jnp.concatenate([own.positions, delta.positions], axis=1)
            out.append(Slots(add(own.key, key), add(own.value, value), positions, unseen))
        return Picked(tuple(out))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asked:
    """A cache that asks for a block's queries."""

    cache: KVCache

    def layer(self, index: int, length: Array) -> Slots:
        return self.cache.layer(index, length)._replace(asks=True)


def plain(x: Array | kv_bits.Scaled) -> Array:
    """Slots `[B, K, M, H]` of any cache as plain numbers."""
    if not isinstance(x, kv_bits.Scaled):
        return x
    by_token = kv_bits.Scaled(x.values.swapaxes(1, 2), x.scale.swapaxes(1, 2))
    return kv_bits.read(by_token, jnp.float32).swapaxes(1, 2)


def taken(slots: Slots, at: Array) -> tuple[Array, Array]:
    """Keys and values `[B, K, M, H]` of the slots `at` `[B, M]`, or of other ones for each head `[B, K, M]`."""

    def take(x):
        own = at if at.ndim == 3 else at[:, None]
        by_part = jnp.broadcast_to(own, (x.shape[0], x.shape[1] if own.shape[1] == 1 else own.shape[1], own.shape[2]))
        by_part = jnp.repeat(by_part, x.shape[1] // by_part.shape[1], axis=1)  # scales of several parts of a head
        return jnp.take_along_axis(x, by_part.reshape(*by_part.shape, *[1] * (x.ndim - 3)), axis=2, mode="clip")

    return plain(jax.tree.map(take, slots.key)), plain(jax.tree.map(take, slots.value))


def newest(slots: Slots, length: Array, window: int) -> Slots:
    """The last `window` positions before `length` `[B]`, of a ring or of a whole text."""
    positions = length[:, None] - window + jnp.arange(window)[None]
    at = positions if slots.positions is None else positions % slots.positions.shape[1]
    return Slots(*taken(slots, at), positions, positions < 0)


def streamed(
    slots: Slots, length: Array, sinks: int, budget: int, turn: Callable[[Array, Array], Array] | None
) -> Slots:
    """The first `sinks` tokens and the newest ones before `length` `[B]`.

    Args:
      slots: of a layer that sees the whole text.
      length: tokens.
      sinks: how many of the first.
      budget: M.
      turn: turns keys `[B, K, M, H]` by so many positions `[B]`; None: the layer has no positions.
    """
    first = jnp.maximum(length - (budget - sinks), sinks)
    recent = first[:, None] + jnp.arange(budget - sinks)[None]
    at = jnp.concatenate([jnp.broadcast_to(jnp.arange(sinks), (length.shape[0], sinks)), recent], axis=1)
    key, value = taken(slots, at)
    if turn is not None:
        key = jnp.concatenate([turn(key[:, :, :sinks], first - sinks), key[:, :, sinks:]], axis=2)
    return Slots(key, value, None, at >= length[:, None])


def turn(rope: RopeConfig, head_dim: int, longest: int, key: Array, by: Array) -> Array:
    """Rotated keys `[B, K, M, H]`, rotated further by so many positions `[B]`."""
    cos, sin = tables_of(rope_frequencies(rope, head_dim, longest), by[:, None])
    return rotate(key, cos, sin)


def kept(slots: Slots, chosen: Array, alike: Array) -> Slots:
    """Slots that each head chose, `[B, K, C]`, and others that all heads read, `[B, M]`; -1 for none.

    Heads choose equally many, since only a short prompt has too few."""
    shared = jnp.broadcast_to(alike[:, None], (*chosen.shape[:2], alike.shape[1]))
    key, value = taken(slots, jnp.maximum(jnp.concatenate([chosen, shared], axis=2), 0))
    unseen = jnp.concatenate([jnp.all(chosen < 0, axis=1), alike < 0], axis=1)
    return Slots(key, value, None, unseen)


def attended(key: Any, query: Array, positions: Array, prompt: Array, start: Array, count: int, pool: int) -> Array:
    """The slots `[B, K, count]` int32 before `start` that a prompt's last queries attend to most, in order; -1 for none.

    Each query's attention is over all it sees. It is summed over the queries, averaged over `pool` neighbouring slots, and
    summed over the heads that share keys. The released code leaves out the factor of the scores, which SnapKV has.

    Args:
      key: `[B, K, S, H]` of the cache.
      query: `[B, W, K, G * H]`, scaled.
      positions: `[B, W]`, of the queries.
      prompt: `[B]`, the prompt's tokens; queries after them do not count.
      start: `[B]`, where the last tokens begin, which are kept anyway.
      count: how many slots are chosen.
      pool: see above.
    """
    key = plain(key).astype(jnp.float32)
    slots = jnp.arange(key.shape[2])[None]
    before = slots < start[:, None]
    query = query.reshape(*query.shape[:3], -1, key.shape[3]).astype(jnp.float32)
    scores = jnp.einsum("bwkgh,bksh->bkgws", query, key, precision="highest")
    seen = (slots[None] <= positions[:, :, None]) & (positions < prompt[:, None])[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    weights = jnp.where((seen & before[:, None])[:, None, None], weights, 0.0)
    received = weights.sum(axis=(2, 3))  # [B, K, S]
    pooled = jax.lax.reduce_window(received, 0.0, jax.lax.add, (1, 1, pool), (1, 1, 1), "SAME") / pool
    worth, at = jax.lax.top_k(jnp.where(before[:, None], pooled, -1.0), min(count, key.shape[2]))
    at = jnp.sort(jnp.where(worth >= 0, at, key.shape[2]), axis=2)
    at = jnp.where(at < key.shape[2], at, -1)
    return jnp.pad(at, ((0, 0), (0, 0), (0, count - at.shape[2])), constant_values=-1).astype(jnp.int32)
