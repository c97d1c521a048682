"""Clover-2's modules (arXiv:2408.00264): a regressive attention block before and between the heads.

Shapes: `B` rows, `T` slots, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.clover.network import Regressive, RegressiveBlock, RegressiveHead
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm

Array = jax.Array


class Clover(Regressive):
    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        linear = lambda inputs: nnx.Linear(inputs, size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.first, self.next = RegressiveBlock(config, dtype, rngs), RegressiveBlock(config, dtype, rngs)
        self.layers = self.layers_of(config, dtype, rngs)
        self.norm = RMSNorm(size, config.norm.eps, dtype)
        self.augment, self.augment_next = linear(size), linear(2 * size)
        self.head_norm = RMSNorm(size, config.norm.eps, dtype)

    def context(self, embeds, features, rope, block, cache):
        h, kvs = self.through(self.first(features.astype(embeds.dtype), embeds), rope, block, cache)
        return self.norm(h), kvs


@dataclasses.dataclass(frozen=True)
class CloverHead(RegressiveHead):
    """Clover-2's network.

    Attributes:
      linear: whether the augmenting blocks are linear, as published.
    """

    linear: bool = False

    def module(self, dtype, rngs):
        return Clover(self.config, dtype, rngs)

    def outputs(self, params: Any, h: Array, embeds: Array | None) -> Array:
        """The input of the language-model head, `[B, T, E]`: without `embeds` for the first head, with them for the others."""
        model = self.bind(params)
        if embeds is None:
            mixed = model.augment(h)
        else:
            mixed = model.augment_next(jnp.concatenate([h, embeds.astype(h.dtype)], axis=-1))
        return model.head_norm(mixed if self.linear else h + jax.nn.silu(mixed))
