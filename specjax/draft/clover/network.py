"""Clover's modules (arXiv:2405.00263): an augmenting block, and heads joined by a regressive attention decoder.

The decoder is that of the successor's code (XiaoBin1992/clover), which names it after Clover's. Shapes: `B` rows, `T`
slots, `E` width, `N` heads of attention.
"""

import abc
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


class Regressive(nnx.Module):
    """A network of decoder layers over pairs, and of a block that mixes one more token into the state that they make."""

    layers: Any

    def layers_of(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs) -> nnx.List:
        return nnx.List([layer.build(config.hidden_size, dtype, rngs) for layer in config.layers])

    def through(self, h, rope, block, cache):
        """The stream after the layers, and each layer's keys and values."""
        kvs = []
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else (cache.key[i], cache.value[i])
            h, kv = layer(h, rope, block, layer_cache, None, block.positions)
            kvs.append(kv)
        return h, kvs


class Clover(Regressive):
    """The layers read features alone; the first token that is mixed in is the one after the feature."""

    def __init__(self, config: ModelConfig, heads: int, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        zeros = nnx.initializers.zeros_init()
        block = lambda: nnx.Linear(size, size, kernel_init=zeros, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = self.layers_of(config, dtype, rngs)
        self.next = RegressiveBlock(config, dtype, rngs)
        self.blocks = nnx.List([block() for _ in range(heads)])
        self.head_norm = RMSNorm(size, config.norm.eps, dtype)

    def context(self, embeds, features, rope, block, cache):
        h, kvs = self.through(features.astype(embeds.dtype), rope, block, cache)
        return self.next(h, embeds), kvs


@dataclasses.dataclass(frozen=True)
class RegressiveHead(abc.ABC):
    """Such a network as functions of a params pytree.

    Attributes:
      config: the config of the decoder layers before the heads.
    """

    config: ModelConfig

    @abc.abstractmethod
    def module(self, dtype: Any, rngs: nnx.Rngs) -> Any:
        """The network with random parameters; regressive blocks start near the identity."""

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters, see `module`."""
        return nnx.to_pure_dict(nnx.split(self.module(dtype, nnx.Rngs(key)))[1])

    def bind(self, params: Any) -> Any:
        """The module that holds these parameters; keys of the draft's vocabulary are left out."""
        own = {name: value for name, value in params.items() if name not in ("head", "ids", "embed")}
        graph = nnx.split(nnx.eval_shape(lambda: self.module(params_dtype(own), nnx.Rngs(0))))[0]
        return nnx.merge(graph, own)

    def context(
        self, params: Any, embeds: Array, features: Array, block: Block, cache: KVCache | None
    ) -> tuple[Array, KVDelta]:
        """States `[B, T, E]` of pairs (feature, next token's embedding), and their part of the cache."""
        rope = self.config.tables(block.positions)
        embeds = embeds.astype(params["next"]["q"]["kernel"].dtype)
        h, kvs = self.bind(params).context(embeds, features, rope, block, cache)
        keys, values = zip(*kvs, strict=True)
        return h, KVDelta(tuple(keys), tuple(values), block.positions)

    def advance(self, params: Any, h: Array, embeds: Array) -> Array:
        """The state `[B, T, E]` after one more drafted token."""
        return self.bind(params).next(h, embeds.astype(h.dtype))


@dataclasses.dataclass(frozen=True)
class CloverHead(RegressiveHead):
    """Clover's network.

    Attributes:
      heads: how many.
    """

    heads: int = 3

    def module(self, dtype, rngs):
        return Clover(self.config, self.heads, dtype, rngs)

    def outputs(self, params: Any, h: Array, depth: int) -> Array:
        """The input of the language-model head, `[B, T, E]`, by head `depth`'s residual block."""
        model = self.bind(params)
        return model.head_norm(h + jax.nn.silu(model.blocks[depth](h)))
