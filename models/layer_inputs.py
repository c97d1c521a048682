"""What every layer of a model reads of its tokens besides the residual stream (the small Gemma 4).

A second table has a vector of width P for every token and layer. With what the embedding projects to, it is added at the
layer's end, through a gate.
Shapes: `B` rows, `T` tokens, `E` width, `L` layers, `P` width of an input.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.gemma_experts import linear
from specjax.models.llama_config import LlamaConfig
from specjax.models.norms import RMSNorm

Array = jax.Array


class LayerInputs(nnx.Module):
    """The inputs of all layers, once a pass."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs):
        c = config
        width, tokens = c.num_hidden_layers * c.hidden_size_per_layer_input, c.vocab_size_per_layer_input
        self.embed = nnx.Embed(tokens, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.proj = linear(c.hidden_size, width, dtype, rngs)
        self.norm = RMSNorm(c.hidden_size_per_layer_input, c.rms_norm_eps, dtype, c.norm)
        self.tokens, self.width = tokens, c.hidden_size_per_layer_input

    def __call__(self, tokens: Array, embedded: Array) -> Array:
        """Ids `[B, T]` and their embeddings `[B, T, E]` to `[B, T, L, P]`; ids outside the table are read as token 0."""
        known = (tokens >= 0) & (tokens < self.tokens)
        own = self.embed.embedding[...].at[jnp.where(known, tokens, 0)].get(mode="promise_in_bounds")
        own = own.astype(embedded.dtype) * jnp.asarray(self.width**0.5, embedded.dtype)
        split = lambda x: x.reshape(*tokens.shape, -1, self.width)
        seen = self.norm(split(self.proj(embedded) * embedded.shape[-1] ** -0.5))
        return (seen + split(own)) * 2**-0.5


class LayerInput(nnx.Module):
    """How a layer adds its own."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs):
        c = config
        self.gate = linear(c.hidden_size, c.hidden_size_per_layer_input, dtype, rngs)
        self.proj = linear(c.hidden_size_per_layer_input, c.hidden_size, dtype, rngs)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype, c.norm)

    def __call__(self, x: Array, own: Array) -> Array:
        """`x` `[B, T, E]` with what the layer makes of `own` `[B, T, P]`."""
        return x + self.norm(self.proj(nnx.gelu(self.gate(x)) * own))
