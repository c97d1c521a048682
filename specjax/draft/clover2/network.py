"""Clover-2's modules (arXiv:2408.00264): a regressive attention block before and between the heads.

Shapes: `B` rows, `T` slots, `E` width, `N` heads.
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


class RegressiveBlock(nnx.Module):
    """Mixes a token's embedding into a state: one gate per head, the cosine of query and key, scales the value."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        noise = lambda: jax.random.uniform(rngs.params(), (size, size), dtype, 0.0, 0.01)
        linear = lambda: nnx.Linear(size, size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(size, config.norm.eps, dtype)
        self.q, self.k, self.v = linear(), linear(), linear()
        self.q.kernel[...] = jnp.eye(size, dtype=dtype) + noise()
        self.k.kernel[...] = jnp.eye(size, dtype=dtype) + noise()
        self.v.kernel[...] = noise()
        self.heads = config.near.num_attention_heads

    def gate(self, x: Array, embeds: Array) -> Array:
        """`[B, T, N]` in [-1, 1]."""
        split = lambda y: y.reshape(*y.shape[:-1], self.heads, -1).astype(jnp.float32)
        q, k = split(self.q(self.norm(x))), split(self.k(embeds))
        norms = jnp.linalg.norm(q, axis=-1) * jnp.linalg.norm(k, axis=-1)
        return (q * k).sum(axis=-1) / jnp.maximum(norms, 1e-6)

    def __call__(self, x: Array, embeds: Array) -> Array:
        value = self.v(embeds).reshape(*embeds.shape[:-1], self.heads, -1)
        gated = self.gate(x, embeds)[..., None].astype(value.dtype) * value
        return x + gated.reshape(x.shape)


class Clover(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        linear = lambda inputs: nnx.Linear(inputs, size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.first, self.next = RegressiveBlock(config, dtype, rngs), RegressiveBlock(config, dtype, rngs)
        self.layers = nnx.List([layer.build(size, dtype, rngs) for layer in config.layers])
        self.norm = RMSNorm(size, config.norm.eps, dtype)
        self.augment, self.augment_next = linear(size), linear(2 * size)
        self.head_norm = RMSNorm(size, config.norm.eps, dtype)

    def context(self, embeds, features, rope, block, cache):
        h = self.first(features.astype(embeds.dtype), embeds)
        kvs = []
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else (cache.key[i], cache.value[i])
            h, kv = layer(h, rope, block, layer_cache, None, block.positions)
            kvs.append(kv)
        return self.norm(h), kvs


@dataclasses.dataclass(frozen=True)
class CloverHead:
    """The modules as functions of a params pytree.

    Attributes:
      config: the config of the decoder layers before the heads.
      linear: whether the augmenting blocks are linear, as published.
    """

    config: ModelConfig
    linear: bool = False

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters; regressive blocks start near the identity."""
        return nnx.to_pure_dict(nnx.split(Clover(self.config, dtype, nnx.Rngs(key)))[1])

    def bind(self, params: Any) -> Clover:
        """The module that holds these parameters; keys of the draft's vocabulary are left out."""
        own = {name: value for name, value in params.items() if name not in ("head", "ids", "embed")}
        graph = nnx.split(nnx.eval_shape(lambda: Clover(self.config, params_dtype(own), nnx.Rngs(0))))[0]
        return nnx.merge(graph, own)

    def context(
        self, params: Any, embeds: Array, features: Array, block: Block, cache: KVCache | None
    ) -> tuple[Array, KVDelta]:
        """States `[B, T, E]` of pairs (feature, next token's embedding), and their part of the cache."""
        rope = self.config.tables(block.positions)
        embeds = embeds.astype(params["augment"]["kernel"].dtype)
        h, kvs = self.bind(params).context(embeds, features, rope, block, cache)
        keys, values = zip(*kvs, strict=True)
        return h, KVDelta(tuple(keys), tuple(values), block.positions)

    def advance(self, params: Any, h: Array, embeds: Array) -> Array:
        """The state `[B, T, E]` after one more drafted token."""
        return self.bind(params).next(h, embeds.astype(h.dtype))

    def outputs(self, params: Any, h: Array, embeds: Array | None) -> Array:
        """The input of the language-model head, `[B, T, E]`: without `embeds` for the first head, with them for the others."""
        model = self.bind(params)
        if embeds is None:
            mixed = model.augment(h)
        else:
            mixed = model.augment_next(jnp.concatenate([h, embeds.astype(h.dtype)], axis=-1))
        return model.head_norm(mixed if self.linear else h + jax.nn.silu(mixed))
