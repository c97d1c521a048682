"""Keys and values: the cache of committed tokens, and what a block adds to it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Bool, Int
from specjax.kernels.kv_commit import kv_commit
from specjax.models import kv_bits
from specjax.models.kept import Kept, Place
from specjax.models.source_cache import Seen, SourceCache
from specjax.pretty import Pretty


class Slots(NamedTuple):
    """The part of a cache that a layer's queries can see.

    Attributes:
      key: `[B, K, S, H]`, or `kv_bits.Scaled`.
      value: as `key`; None: values are made of the keys.
      positions: `[B, S]` int32, the positions that the slots of a ring hold; None: slot s holds position s.
      unseen: `[B, S]` bool, slots that no query sees, where the length alone does not tell; or None.
      asks: whether a block's delta includes queries.
      attend: the implementation of attention over these slots, as `tree_attention` takes it; None: the model's.
    """

    key: Any
    value: Any
    positions: Int[Array, "B S"] | None = None
    unseen: Bool[Array, "B S"] | None = None
    asks: bool = False
    attend: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache(Pretty):
    """Keys and values of the committed tokens; slot s of a row holds position s.

    A layer whose S is less than the capacity has a ring: position p is in slot p mod S, where it replaces position p -
    S. A block that begins at position n sees the window before n. A ring surely holds that window if two conditions
    hold:

    - No commit wrote more than `ahead` positions from n on.
    - S is at least the window plus `ahead`.

    Then rejected tokens, or tokens after a prompt, have only replaced positions that no query sees any more. A row
    whose length goes back further has lost its window.

    Attributes:
      key: a tuple over layers of `[B, K, S, H]`, or of `kv_bits.Scaled` for eight bits. Layers that read another
        layer's keys and values are left out.
      value: as `key`; values may have another width. None for a layer whose values are made of its keys
        (`specjax.models.latent`).
      capacity: static, how many positions a row may have; 0 if no layer has a ring.
      ahead: static, see above.
      states: a tuple over the layers that keep a running state (`specjax.models.mixers`).
      source: what an encoder made of the rows' sources; None: the model has no encoder.
    """

    key: tuple[Any, ...]
    value: tuple[Any, ...]
    capacity: int = dataclasses.field(default=0, repr=False, metadata={"static": True})
    ahead: int = dataclasses.field(default=0, repr=False, metadata={"static": True})
    states: tuple[Any, ...] = ()
    source: SourceCache | None = None

    def layer(self, index: int, length: Array) -> Slots:
        """The slots that a layer reads, by their index; for a ring, with the positions `[B, S]` that they hold after `length`
        `[B]` tokens."""
        key, value = self.key[index], self.value[index]
        slots = key.shape[2]
        if slots >= self.capacity:
            return Slots(key, value)
        last = length[:, None] - 1
        return Slots(key, value, last - (last - jnp.arange(slots)[None]) % slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVDelta(Pretty):
    """A block's keys and values, as the cache holds them, with their positions.

    Attributes:
      key: a tuple over layers of `[B, T, K, H]`, as in `KVCache`.
      value: as `key`.
      positions: `[B, T]` int32.
      query: a tuple over layers of `[B, T, K, G * H]`, scaled queries, if a cache asks for them (`Slots.asks`);
        otherwise empty.
      states: a tuple over the layers that keep a running state, of the data to replay a path; leaves lead with
        `[B, T]`.
    """

    key: tuple[Any, ...]
    value: tuple[Any, ...]
    positions: Int[Array, "B T"]
    query: tuple[Any, ...] = ()
    states: tuple[Any, ...] = ()

    def at(self, place: Place) -> Kept:
        """A layer's part: keys and values, and the data to replay its state."""
        slots = None if place.slots is None else (self.key[place.slots], self.value[place.slots])
        return Kept(slots, None if place.state is None else self.states[place.state])


def seen_at(cache: Any, place: Place, length: Array) -> Kept:
    """The part of a cache that a layer reads after `length` `[B]` tokens: its `Slots` and its running state."""
    slots = None if place.slots is None else cache.layer(place.slots, length)
    return Kept(slots, None if place.state is None else cache.states[place.state])


def source_at(cache: Any, place: Place) -> Seen | None:
    """What a layer reads of the source; None: nothing."""
    return None if cache is None or place.source is None else cache.source.at(place.source)


def init_kv(config: Any, batch: int, capacity: int, dtype: Any, ahead: int | None = None) -> KVCache:
    """An empty cache of `capacity` slots per row, for the layers of a `ModelConfig` that keep anything.

    Args:
      config: the model's.
      batch: B.
      capacity: how many positions a row may have.
      dtype: of keys and values; int8 and float8 have a scale for each slot and head.
      ahead: if given, layers with a window have rings of the window plus `ahead` slots; see `KVCache`.
    """
    owners = config.owners
    full = lambda i: ahead is None or config.window(i) is None
    slots = {i: capacity if full(i) else min(capacity, config.window(i) + ahead) for i in owners}
    kinds = {i: config.slot_mixer(i).slots for i in owners}
    made = lambda i, width: kv_bits.empty((batch, kinds[i].heads, slots[i], width), dtype, kinds[i].parts)
    keys = tuple(made(i, kind.key) for i, kind in kinds.items())
    values = tuple(made(i, kind.value) if kind.value else None for i, kind in kinds.items())
    states = tuple(mixer.init(config.hidden_size, batch, dtype) for mixer in config.state_mixers)
    rings = {} if ahead is None else {"capacity": capacity, "ahead": ahead}
    source = None
    if config.encoder is not None:
        kept = config.encoder.slots(capacity)
        source = SourceCache.empty(config.crosses, batch, kept, dtype, config.encoder.shared)
    return KVCache(keys, values, **rings, states=states, source=source)


def kv_axes(cache: Any, config: Any = None) -> Any:
    """Logical axis names of every leaf of a cache, or of None. `config` is needed if the cache has states."""
    axes = jax.tree.map(lambda leaf: ("batch", "kv_heads", "slots", None)[: leaf.ndim], cache)
    if isinstance(cache, KVCache) and cache.source is not None:
        axes = dataclasses.replace(axes, source=cache.source.axes())
    mixers = () if config is None else config.state_mixers
    if not mixers:
        return axes
    states = tuple(mixer.axes(state) for mixer, state in zip(mixers, cache.states, strict=True))
    return dataclasses.replace(axes, states=states)


def commit_kv(cache: KVCache, delta: KVDelta, src: Array | None, dst: Array) -> KVCache:
    """See `specjax.lm.LM.commit`.

    Raises:
      ValueError: if a ring would be written further ahead than it has room for.
    """
    old, structure = jax.tree.flatten((cache.key, cache.value))
    new = jax.tree.leaves((delta.key, delta.value))
    written = list(old)
    for slots in dict.fromkeys(x.shape[2] for x in old):
        own, positions = [i for i, x in enumerate(old) if x.shape[2] == slots], None
        if slots < cache.capacity:
            positions = cache.capacity
            count = (delta.positions if src is None else src).shape[1]
            if count > cache.ahead:
                raise ValueError(
                    f"layers with a window keep {cache.ahead} slots besides it, and are written as many tokens at a time, "
                    f"not {count}"
                )
        leaves = kv_commit([old[i] for i in own], [new[i] for i in own], src, dst, positions=positions)
        for i, leaf in zip(own, leaves, strict=True):
            written[i] = leaf
    key, value = jax.tree.unflatten(structure, written)
    return dataclasses.replace(cache, key=key, value=value)


def stack_past(past: KVDelta | None, delta: KVDelta) -> KVDelta:
    """Uncommitted keys and values of two blocks, the earlier one first."""
    if past is None:
        return delta
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, delta)
