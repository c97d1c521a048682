"""EAGLE's draft layer (Li et al. 2024, arXiv:2401.15077): a decoder layer over target features.

Slot i holds the pair (feature of token i, embedding of token i + 1) at position i; its output predicts token i + 2.
Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.lm import Block
from specjax.models.kv import KVCache, KVDelta
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm

Array = jax.Array


class EagleLayer(nnx.Module):
    """A decoder layer without the norm before attention; both residuals stay.

    With two `outputs`, its MLP writes two vectors of the model's width, and each is added to the same residual (FSPAD).
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs, outputs: int = 1):
        self.attention = config.attention().build(config.hidden_size, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm.eps, dtype)
        self.mlp = config.dense.build(config.hidden_size, dtype, rngs, outputs * config.hidden_size)
        self.outputs = outputs

    def __call__(self, x, rope, block, cache, past, positions):
        attended, kv = self.attention(x, rope, block, cache, past, positions)
        x = x + attended
        return jnp.concatenate([x] * self.outputs, axis=-1) + self.mlp(self.mlp_norm(x)), kv


class EagleLayers(nnx.Module):
    """EAGLE's layer, and after it ordinary decoder layers, which have a norm before attention, if `config` has several."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        self.layer = EagleLayer(config, dtype, rngs)
        if config.num_hidden_layers > 1:
            self.more = nnx.List([layer.build(config.hidden_size, dtype, rngs) for layer in config.layers[1:]])

    def through(self, x, rope, block, caches, pasts, positions):
        """The outputs `[B, T, E]` of inputs `[B, T, E]`, and every layer's keys and values."""
        x, kv = self.layer(x, rope, block, caches[0], pasts[0], positions)
        kvs = [kv]
        for layer, cache, past in zip(getattr(self, "more", ()), caches[1:], pasts[1:], strict=True):
            x, kv = layer(x, rope, block, cache, past, positions)
            kvs.append(kv)
        return x, kvs


class Eagle(EagleLayers):
    """EAGLE-1 and EAGLE-2: `fc` over embedding and feature, then the layers; these have one, and Gumiho has several."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc = nnx.Linear(2 * width, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        super().__init__(config, dtype, rngs)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        x = self.fc(jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1))
        return self.through(x, rope, block, caches, pasts, positions)


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """EAGLE-1's module as functions of a params pytree.

    Attributes:
      config: of its layers; their width is the target's. EAGLE-1 and 2 have one.
      besides: the drafter's parameters that do not belong to the module.
    """

    config: ModelConfig
    besides: tuple[str, ...] = dataclasses.field(default=("head", "ids", "embed"), kw_only=True)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(self._module(dtype, nnx.Rngs(key)))[1])

    def __call__(
        self,
        params: Any,
        embeds: Array,
        features: Array,
        block: Block,
        cache: KVCache | None,
        past: KVDelta | None = None,
        **more: Any,
    ) -> tuple[Array, KVDelta]:
        """The module's outputs `[B, T, F]` for pairs, predicted features, and the pairs' part of the cache.

        Args:
          params: from `init`; keys that belong to the draft's vocabulary or to its own embedding are ignored.
          embeds: `[B, T, E]`, the embedding of every pair's token.
          features: `[B, T, E]`.
          block: positions and visibility of the pairs.
          cache: of committed pairs.
          past: uncommitted pairs before this block.
          **more: what the module reads besides.
        """
        own = {name: value for name, value in params.items() if name not in self.besides}
        dtype = params_dtype(own)
        module = nnx.merge(self._graph(dtype), own)
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        layers = self.config.num_hidden_layers
        each = lambda kv: [None] * layers if kv is None else list(zip(kv.key, kv.value, strict=True))
        rope = self.config.tables(block.positions)
        out, kvs = module(embeds.astype(dtype), features, rope, block, each(cache), each(past), positions, **more)
        keys, values = zip(*kvs, strict=True)
        return out, KVDelta(keys, values, block.positions)

    def _module(self, dtype, rngs) -> nnx.Module:
        return Eagle(self.config, dtype, rngs)

    def _graph(self, dtype):
        return nnx.split(nnx.eval_shape(lambda: self._module(dtype, nnx.Rngs(0))))[0]
