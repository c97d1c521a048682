"""FSPAD's draft layer (Gui et al. 2024, arXiv:2408.15562): EAGLE's with sampled features and two outputs.

Pairs are EAGLE's. Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleHead, EagleLayer
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm


class Fspad(nnx.Module):
    """`fc` over embedding and feature, an MLP whose gate reads the embedding, then EAGLE's layer with two outputs."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc = nnx.Linear(2 * width, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.sample_norm = RMSNorm(width, config.norm.eps, dtype)
        self.sample = config.dense.build(width, dtype, rngs)
        self.layer = EagleLayer(config, dtype, rngs, outputs=2)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        x = self.fc(jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1))
        x = x + self.sample(self.sample_norm(x), embeds)
        x, kv = self.layer(x, rope, block, caches[0], pasts[0], positions)
        return x, [kv]


@dataclasses.dataclass(frozen=True)
class FspadHead(EagleHead):
    """The module as functions of a params pytree; its outputs `[B, T, 2 E]` are two halves, see `specjax.draft.fspad`."""

    def _module(self, dtype, rngs) -> nnx.Module:
        return Fspad(self.config, dtype, rngs)
