"""The layers of DiffusionGemma's text model, as flax nnx modules: attention of two kinds, and experts beside a dense MLP.

Shapes: `B` rows, `T` block tokens, `M` tokens of all rows, `E` width, `H` head width, `X` experts, `F` an expert's inner width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.tree_attention import tree_attention
from specjax.models import norms
from specjax.models.gemma_config import DiffusionGemmaConfig
from specjax.models.gemma_experts import Experts, Router, linear, with_experts
from specjax.models.gemma_heads import Heads
from specjax.models.linear import by_heads
from specjax.models.norms import rms_norm
from specjax.models.ropes import rotate, tables_of

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """The positions of a pass's tokens, and what they see.

    Attributes:
      rope: `(cos, sin)` of sliding layers, and of full ones.
      length: `[B]` int32, the number of stored positions.
      visible: `[B, T, T]` bool, which tokens of the block a token sees; None: as `causal` says, or all.
      near: `[B, T]` int32, the position from which a sliding window counts back: a token's own position or, for every
        token of a canvas, the end of the stored positions.
      scaled: `[B, 1, 1]` bool, the rows whose layers end with the encoder's scalar.
      causal: see `Block`.
    """

    rope: tuple[tuple[Array, Array], tuple[Array, Array]]
    length: Array
    visible: Array | None
    near: Array
    scaled: Array
    causal: bool = dataclasses.field(default=True, metadata={"static": True})


RMSNorm = functools.partial(norms.RMSNorm, kind="wide")


class Attention(nnx.Module):
    """Attention with normalised queries, keys and values, so scores are not scaled. Full layers take their values from
    their keys."""

    def __init__(self, config: DiffusionGemmaConfig, layer: int, dtype: Any, rngs: nnx.Rngs):
        c, heads = config, config.heads(layer)
        self.q = linear(c.hidden_size, c.num_attention_heads * heads.head_dim, dtype, rngs)
        self.k = linear(c.hidden_size, heads.num_key_value_heads * heads.head_dim, dtype, rngs)
        if c.sliding_layers[layer]:
            self.v = linear(c.hidden_size, heads.num_key_value_heads * heads.head_dim, dtype, rngs)
        self.o = linear(c.num_attention_heads * heads.head_dim, c.hidden_size, dtype, rngs)
        self.q_norm = RMSNorm(heads.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(heads.head_dim, c.rms_norm_eps, dtype)
        self.heads, self.eps = heads, c.rms_norm_eps
        self.window = c.sliding_window if c.sliding_layers[layer] else None

    def __call__(self, x: Array, view: View, cache: tuple[Array, Array] | None):
        """Returns the output and the block's keys and values. `cache` holds this layer's keys and values, or is
        None."""
        batch, length, _ = x.shape
        split = lambda y: by_heads(y, self.heads.head_dim)
        rope = view.rope[self.window is None]
        q, k = split(self.q(x)), split(self.k(x))
        v = k if self.window is None else split(self.v(x))
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        v = rms_norm(v, None, self.eps)
        if cache is not None:  # a block reads its own K/V rounded as the cache will return them
            k, v = k.astype(cache[0].dtype), v.astype(cache[1].dtype)
        out = tree_attention(
            q,
            k,
            v,
            None if cache is None else cache[0],
            None if cache is None else cache[1],
            view.length,
            visible=view.visible,
            query_positions=view.near,
            key_positions=view.near,
            causal=view.causal,
            scale=1.0,
            window=self.window,
        )
        return self.o(out.reshape(batch, length, -1)), (k, v)


class MLP(nnx.Module):
    def __init__(self, config: DiffusionGemmaConfig, dtype: Any, rngs: nnx.Rngs):
        self.gate = linear(config.hidden_size, config.intermediate_size, dtype, rngs)
        self.up = linear(config.hidden_size, config.intermediate_size, dtype, rngs)
        self.down = linear(config.intermediate_size, config.hidden_size, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """A layer; its norms have Hugging Face's names."""

    def __init__(self, config: DiffusionGemmaConfig, layer: int, dtype: Any, rngs: nnx.Rngs):
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, layer, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)
        self.router = Router(config.experts, config.hidden_size, config.rms_norm_eps, dtype, rngs)
        self.experts = Experts(config.hidden_size, config.num_experts, config.moe_intermediate_size, dtype, rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.pre_feedforward_layernorm_2 = norm()
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        self.encoder_scale = nnx.Param(jnp.ones((1,), dtype))
        self.decoder_scale = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x: Array, view: View, cache: tuple[Array, Array] | None):
        attended, kv = self.attention(self.input_layernorm(x), view, cache)
        x = x + self.post_attention_layernorm(attended)
        fed = with_experts(self, x, self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + self.post_feedforward_layernorm(fed)
        scale = lambda of: of[...][None, None]
        return x * jnp.where(view.scaled, scale(self.encoder_scale), scale(self.decoder_scale)), kv


class SelfConditioning(MLP):
    """Adds the output of a gated MLP over a soft embedding to a token's own embedding."""

    def __init__(self, config: DiffusionGemmaConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.eps = config.rms_norm_eps

    def join(self, own: Array, soft: Array) -> Array:
        """The decoder's inputs, from embeddings and soft embeddings `[B, T, E]`."""
        return rms_norm(own + self(self.pre_norm(soft)), None, self.eps)


def rope_tables(heads: Heads, positions: Array) -> tuple[Array, Array]:
    """See `specjax.models.ropes.rope_tables`; pairs that are not rotated have frequency 0."""
    exponent = jnp.arange(0, heads.head_dim, 2, dtype=jnp.float32) / heads.head_dim
    rotated = jnp.arange(heads.head_dim // 2) < heads.rotated
    frequencies = jnp.where(rotated, 1.0 / heads.rope_theta**exponent, 0.0) / heads.rope_factor
    return tables_of(frequencies, positions)
