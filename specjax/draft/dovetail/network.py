"""Dovetail's modules (Zhang et al. 2024, arXiv:2412.18934): dynamic gating fusion, and EAGLE's layers.

Pairs are EAGLE's. Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleHead, EagleLayers
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm


class Dovetail(EagleLayers):
    """The layers read `z * f + (1 - z) * e`, with a share `z` for every number that both vectors decide.

    f is a product of the feature, and e the SiLU of a product of the normed embedding (the norm is from the authors' code).
    All three products begin as Xavier's uniform numbers, and have no biases.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width, init = config.hidden_size, nnx.initializers.xavier_uniform()
        linear = functools.partial(
            nnx.Linear, use_bias=False, kernel_init=init, param_dtype=dtype, dtype=dtype, rngs=rngs
        )
        self.token_norm = RMSNorm(width, config.norm.eps, dtype)
        self.feature, self.token, self.share = linear(width, width), linear(width, width), linear(2 * width, width)
        super().__init__(config, dtype, rngs)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        f = self.feature(features.astype(embeds.dtype))
        e = jax.nn.silu(self.token(self.token_norm(embeds)))
        z = jax.nn.sigmoid(self.share(jnp.concatenate([f, e], axis=-1)))
        return self.through(z * f + (1 - z) * e, rope, block, caches, pasts, positions)


@dataclasses.dataclass(frozen=True)
class DovetailHead(EagleHead):
    """The module as functions of a params pytree; `config` may have several layers."""

    def _module(self, dtype, rngs) -> nnx.Module:
        return Dovetail(self.config, dtype, rngs)
