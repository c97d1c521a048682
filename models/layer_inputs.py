"""Inputs of every layer besides the residual stream (Gemma 3n, the small Gemma 4 models).

A second table has a vector of width P for every token and layer. It is combined with a projection of the embedding and
added at the layer's end, through a gate.

Shapes: `B` rows, `T` tokens, `E` width, `L` layers, `P` width of an input.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.gemma_experts import linear
from specjax.models.norms import NormConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """The table of the layers' further inputs.

    Attributes:
      width: P.
      vocab_size: the number of tokens in the table.
    """

    width: int
    vocab_size: int


class LayerInputs(nnx.Module):
    """The inputs of all `layers`, once per pass, in a model of width `size`."""

    def __init__(
        self, config: LayerInputsConfig, layers: int, size: int, norm: NormConfig, dtype: Any, rngs: nnx.Rngs
    ):  # fmt: skip
        width = layers * config.width
        self.embed = nnx.Embed(config.vocab_size, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.proj = linear(size, width, dtype, rngs)
        self.norm = norm.build(config.width, dtype)
        self.tokens, self.width = config.vocab_size, config.width

    def __call__(self, tokens: Array, embedded: Array) -> Array:
        """The inputs `[B, T, L, P]`, from ids `[B, T]` and their embeddings `[B, T, E]`. Ids outside the table are read
        as token 0."""
        known = (tokens >= 0) & (tokens < self.tokens)
        own = self.embed.embedding[...].at[jnp.where(known, tokens, 0)].get(mode="promise_in_bounds")
        own = own.astype(embedded.dtype) * jnp.asarray(self.width**0.5, embedded.dtype)
        split = lambda x: x.reshape(*tokens.shape, -1, self.width)
        seen = self.norm(split(self.proj(embedded) * embedded.shape[-1] ** -0.5))
        return (seen + split(own)) * 2**-0.5


class LayerInput(nnx.Module):
    """The module by which a layer of width `size` reads its own input, of width `inputs`."""

    def __init__(self, inputs: int, size: int, norm: NormConfig, dtype: Any, rngs: nnx.Rngs):
        self.gate = linear(size, inputs, dtype, rngs)
        self.proj = linear(inputs, size, dtype, rngs)
        self.norm = norm.build(size, dtype)

    def __call__(self, x: Array, own: Array) -> Array:
        """What is added to the residual stream `x` `[B, T, E]` for the layer's input `own` `[B, T, P]`."""
        return self.norm(self.proj(nnx.gelu(self.gate(x)) * own))
