"""Keys and values: the cache of committed tokens, and what a block adds to it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.kv_commit import kv_commit
from specjax.pretty import Pretty

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache(Pretty):
    """Keys and values of the committed tokens; slot s of a row holds position s.

    Attributes:
      key: a tuple over layers of `[B, K, S, H]`, those that read another's keys and values left out.
      value: as `key`.
    """

    key: tuple[Array, ...]
    value: tuple[Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVDelta(Pretty):
    """A block's keys and values, in the cache's type, with their positions.

    Attributes:
      key: a tuple over layers of `[B, T, K, H]`, as in `KVCache`.
      value: as `key`.
      positions: `[B, T]` int32.
    """

    key: tuple[Array, ...]
    value: tuple[Array, ...]
    positions: Array


def init_kv(config: Any, batch: int, capacity: int, dtype: Any) -> KVCache:
    """An empty cache of `capacity` slots a row for the layers of a `LlamaConfig` that have keys and values."""
    kinds = [config.at(i) for i in range(config.num_hidden_layers) if config.source(i) == i]
    shapes = [(batch, kind.num_key_value_heads, capacity, kind.head_dim) for kind in kinds]
    make = lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes)
    return KVCache(make(), make())


def kv_axes(cache: KVCache) -> KVCache:
    """Logical axis names of every leaf of a cache."""
    return jax.tree.map(lambda _: ("batch", "kv_heads", "slots", None), cache)


def commit_kv(cache: KVCache, delta: KVDelta, src: Array | None, dst: Array) -> KVCache:
    """See `specjax.lm.LM.commit`."""
    layers = len(cache.key)
    written = kv_commit((*cache.key, *cache.value), (*delta.key, *delta.value), src, dst)
    return KVCache(written[:layers], written[layers:])


def stack_past(past: KVDelta | None, delta: KVDelta) -> KVDelta:
    """Uncommitted keys and values of two blocks, the earlier one first."""
    if past is None:
        return delta
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), past, delta)
