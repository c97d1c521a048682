"""Attention of a decoder over what an encoder made of the source.

Shapes: `B` rows, `T` block tokens, `S` source slots, `E` width, `K` heads, `H` head width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.tree_attention import Implementation, tree_attention
from specjax.models import kv_bits
from specjax.models.linear import Linear, by_heads
from specjax.models.source_cache import Seen

Array = jax.Array


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
