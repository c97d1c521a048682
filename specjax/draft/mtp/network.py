"""A target's own multi-token prediction module (DeepSeek-V3, arXiv:2412.19437, section 2.2): one more decoder layer.

Slot i holds the pair (final feature of token i, embedding of token i + 1) at position i; its output predicts token i + 2.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleHead
from specjax.models.model_config import ModelConfig


class Mtp(nnx.Module):
    """`fc` over the normed embedding and the normed feature, the layer, and the norm before the target's head."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.embed_norm, self.hidden_norm, self.norm = (config.norm.build(width, dtype) for _ in range(3))
        self.fc = nnx.Linear(2 * width, width, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layer = config.layers[0].build(width, dtype, rngs)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        both = [self.embed_norm(embeds), self.hidden_norm(features.astype(embeds.dtype))]
        x, kv = self.layer(self.fc(jnp.concatenate(both, axis=-1)), rope, block, caches[0], pasts[0], positions)
        return self.norm(x), [kv]


@dataclasses.dataclass(frozen=True)
class MtpHead(EagleHead):
    """The module as functions of a params pytree; its outputs are normed, both for the head and for the next pass."""

    def _module(self, dtype, rngs) -> nnx.Module:
        return Mtp(self.config, dtype, rngs)
