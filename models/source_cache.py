"""The cache that keeps keys and values of a source, which an encoder read.

Shapes: `B` rows, `S` source slots, `K` heads, `H` head width.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import Int
from specjax.kernels.kv_commit import kv_commit
from specjax.models import kv_bits
from specjax.pretty import Pretty

Array = jax.Array


class Seen(NamedTuple):
    """What a layer reads of a source.

    Attributes:
      key: `[B, K, S, H]`, or `kv_bits.Scaled`.
      value: as `key`.
      length: `[B]` int32, how many slots are the row's.
    """

    key: Any
    value: Any
    length: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceCache(Pretty):
    """Keys and values of a source, computed once. Steps read them and never write them.

    Attributes:
      key: a tuple over the layers that read the source, of `[B, K, S, H]` or `kv_bits.Scaled`.
      value: as `key`.
      length: `[B]` int32, the number of a row's slots in use.
      tokens: `[B, S]` int32, the source's tokens, -1 after them, where the decoder's vocabulary has them; otherwise None.
    """

    key: tuple[Any, ...]
    value: tuple[Any, ...]
    length: Int[Array, " B"]
    tokens: Int[Array, "B S"] | None

    @classmethod
    def empty(cls, mixers: tuple[Any, ...], batch: int, slots: int, dtype: Any, tokens: bool) -> "SourceCache":
        """Of rows without a source; `tokens` says whether tokens are kept."""
        made = lambda one: kv_bits.empty((batch, one.num_attention_heads, slots, one.head_dim), dtype)
        kept = jnp.full((batch, slots), -1, jnp.int32) if tokens else None
        keys, values = (tuple(made(one) for one in mixers) for _ in range(2))
        return cls(keys, values, jnp.zeros((batch,), jnp.int32), kept)

    def at(self, index: int) -> Seen:
        """What a layer reads, by its index among those with attention over the source."""
        return Seen(self.key[index], self.value[index], self.length)

    def filled(self, pairs: list[tuple[Array, Array]], lengths: Array, tokens: Array | None) -> "SourceCache":
        """The cache of rows with these keys and values `[B, S', K, H]` of each layer; S' is at most S."""
        old, form = jax.tree.flatten((self.key, self.value))
        keys, values = zip(*pairs, strict=True)
        new = [kv_bits.stored(x, like) for x, like in zip((*keys, *values), (*self.key, *self.value), strict=True)]
        written = kv_commit(old, jax.tree.leaves(new), None, jnp.zeros_like(self.length))
        key, value = jax.tree.unflatten(form, written)
        kept = self.tokens
        if kept is not None and tokens is not None:
            kept = jnp.full_like(kept, -1).at[:, : tokens.shape[1]].set(tokens)
        return SourceCache(key, value, lengths, kept)

    def axes(self) -> "SourceCache":
        """Logical axis names of every leaf."""
        slots = lambda leaf: ("batch", "kv_heads", "source", None)[: leaf.ndim]
        key, value = jax.tree.map(slots, (self.key, self.value))
        named: Any = {"length": ("batch",), "tokens": None if self.tokens is None else ("batch", "source")}
        return SourceCache(key, value, **named)
