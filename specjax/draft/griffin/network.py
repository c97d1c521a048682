"""GRIFFIN's draft layer (Hu et al. 2025, arXiv:2502.11018): FSPAD's, with another MLP over feature and embedding.

Pairs are EAGLE's. Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleLayer
from specjax.draft.fspad.network import FspadHead
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm


class Griffin(nnx.Module):
    """`fc` over embedding and feature, an MLP over its normed output and the normed embedding, EAGLE's layer with two outputs.

    One norm is for both vectors that the MLP reads, and the first has been normed before.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc = nnx.Linear(2 * width, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.fc_norm, self.both_norm = (RMSNorm(width, config.norm.eps, dtype) for _ in range(2))
        self.both = dataclasses.replace(config.dense, gated=False).build(2 * width, dtype, rngs, width)
        self.layer = EagleLayer(config, dtype, rngs, outputs=2)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        x = self.fc(jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1))
        read = [self.both_norm(self.fc_norm(x)), self.both_norm(embeds)]
        x = x + self.both(jnp.concatenate(read, axis=-1))
        x, kv = self.layer(x, rope, block, caches[0], pasts[0], positions)
        return x, [kv]


@dataclasses.dataclass(frozen=True)
class GriffinHead(FspadHead):
    """The module as functions of a params pytree; its outputs `[B, T, 2 E]` are two halves, see `specjax.draft.fspad`."""

    def _module(self, dtype, rngs) -> nnx.Module:
        return Griffin(self.config, dtype, rngs)
