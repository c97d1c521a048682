"""Attention of a decoder over what an encoder made of the source, and the cache that keeps it.

Shapes: `B` rows, `T` block tokens, `S` source slots, `E` width, `K` heads, `H` head width.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays import Int
from specjax.kernels.kv_commit import kv_commit
from specjax.kernels.tree_attention import Implementation, tree_attention
from specjax.models import kv_bits
from specjax.models.linear import Linear, by_heads
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
    def empty(
        cls, mixers: tuple["CrossConfig", ...], batch: int, slots: int, dtype: Any, tokens: bool
    ) -> "SourceCache":
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


@dataclasses.dataclass(frozen=True)
class CrossConfig:
    """The attention of a layer over the source.

    Attributes:
      num_attention_heads: K; every head has its own keys.
      head_dim: H.
      scale: the factor of the scores; None: H^-0.5.
      bias: whether queries, values and the output have biases.
      key_bias: whether keys have one.
    """

    num_attention_heads: int
    head_dim: int
    scale: float | None = None
    bias: bool = False
    key_bias: bool = False

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None) -> "Cross":
        """The module, for a model of `width`."""
        return Cross(self, width, dtype, rngs, kernel)


class Cross(nnx.Module):
    """See `CrossConfig`."""

    def __init__(
        self, config: CrossConfig, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None
    ):
        c = config
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        inner = c.num_attention_heads * c.head_dim
        self.q = linear(width, inner, use_bias=c.bias)
        self.k = linear(width, inner, use_bias=c.key_bias)
        self.v = linear(width, inner, use_bias=c.bias)
        self.o = linear(inner, width, use_bias=c.bias)
        self.config, self.kernel = config, kernel

    def slots(self, states: Array) -> tuple[Array, Array]:
        """The keys and values `[B, S, K, H]` of an encoder's states `[B, S, E]`."""
        return by_heads(self.k(states), self.config.head_dim), by_heads(self.v(states), self.config.head_dim)

    def __call__(self, x: Array, seen: Seen) -> Array:
        """What tokens `[B, T, E]` read of the source, `[B, T, E]`; nodes of a tree all read the same."""
        c = self.config
        q = by_heads(self.q(x), c.head_dim)
        key, key_scale = kv_bits.parts(seen.key)
        value, value_scale = kv_bits.parts(seen.value)
        # a block has no keys here, and implementations want one
        none = kv_bits.read(kv_bits.stored(jnp.zeros((q.shape[0], 1, *q.shape[2:]), q.dtype), seen.key), q.dtype)
        found = tree_attention(
            q, none, none, key, value, seen.length, visible=jnp.zeros((1, 1, 1), bool),
            scale=c.head_dim**-0.5 if c.scale is None else c.scale, key_scale=key_scale, value_scale=value_scale,
            implementation=self.kernel,
        )  # fmt: skip
        return self.o(found.reshape(*x.shape[:2], -1))

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.o,)
