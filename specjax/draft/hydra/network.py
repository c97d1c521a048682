"""Hydra++'s prefix layer (arXiv:2402.05109, section 4): one decoder layer and a norm over the target's features."""

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


class Prefix(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        self.layer = config.layers[0].build(config.hidden_size, dtype, rngs)
        self.norm = RMSNorm(config.hidden_size, config.norm.eps, dtype)

    def __call__(self, x, rope, block, cache):
        h, kv = self.layer(x, rope, block, cache, None, block.positions)
        return self.norm(h), kv


@dataclasses.dataclass(frozen=True)
class PrefixHead:
    """The layer as functions of a params pytree.

    Attributes:
      config: of the one layer.
    """

    config: ModelConfig

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(Prefix(self.config, dtype, nnx.Rngs(key)))[1])

    def __call__(self, params: Any, features: Array, block: Block, cache: KVCache | None) -> tuple[Array, KVDelta]:
        """Features `[B, T, E]` with earlier ones mixed in, and their part of the cache."""
        dtype = params_dtype(params)
        graph = nnx.split(nnx.eval_shape(lambda: Prefix(self.config, dtype, nnx.Rngs(0))))[0]
        module = nnx.merge(graph, params)
        layer_cache = None if cache is None else (cache.key[0], cache.value[0])
        rope = self.config.tables(block.positions)
        out, (key, value) = module(features.astype(dtype), rope, block, layer_cache)
        return out, KVDelta((key,), (value,), block.positions)
