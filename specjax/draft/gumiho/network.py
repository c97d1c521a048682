"""Gumiho's modules (arXiv:2503.10135): EAGLE's, with ordinary decoder layers after its own, and MLPs over two pairs.

Pairs are EAGLE's. Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.eagle.network import EagleHead
from specjax.draft.gumiho import SERIAL

Array = jax.Array

BLOCKS = 5
"""Residual blocks of an MLP."""


@dataclasses.dataclass(frozen=True)
class GumihoHead(EagleHead):
    """The modules as functions of a params pytree: EAGLE's, and `mlps`: [{`input`: {`kernel` `[2 E, E]`, `bias` `[E]`},
    `blocks`: [{`kernel` `[E, E]`, `bias` `[E]`}]}].

    Attributes:
      mlps: how many.
    """

    besides: tuple[str, ...] = dataclasses.field(default=("head", "ids", "embed", "mlps"), kw_only=True)
    mlps: int = dataclasses.field(default=1, kw_only=True)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters. As the authors do, kernels of MLPs begin at zero, and their biases at small numbers."""
        of_layers, *keys = jax.random.split(key, 1 + self.mlps)
        size = self.config.hidden_size

        def zeros(key, inputs):
            most = inputs**-0.5
            bias = jax.random.uniform(key, (size,), dtype, -most, most)
            return {"kernel": jnp.zeros((inputs, size), dtype), "bias": bias}

        def mlp(key):
            first, *blocks = jax.random.split(key, 1 + BLOCKS)
            return {"input": zeros(first, SERIAL * size), "blocks": [zeros(block, size) for block in blocks]}

        return {**super().init(of_layers, dtype), "mlps": [mlp(key) for key in keys]}

    def joined(self, params: Any, embeds: Array, features: Array) -> Array:
        """The input `[B, T, E]` of the first layer, for tokens' embeddings and the features before them, `[B, T, E]` each."""
        kernel = params["fc"]["kernel"]
        x = jnp.concatenate([embeds.astype(kernel.dtype), features.astype(kernel.dtype)], axis=-1)
        return _linear(x, params["fc"])

    def guess(self, params: Any, number: int, pairs: Array) -> Array:
        """The feature `[B, T, E]` that MLP `number` predicts from two pairs as `joined`, `[B, T, 2 E]`, the earlier one
        first.
        """
        mlp = params["mlps"][number]
        x = jax.nn.silu(_linear(pairs, mlp["input"]))
        for block in mlp["blocks"]:
            x = x + jax.nn.silu(_linear(x, block))
        return x


def _linear(x: Array, part: Any) -> Array:
    """`x` `[..., I]` times a kernel `[I, O]`, plus a bias."""
    return x @ part["kernel"] + jnp.reshape(part["bias"], (1,) * (x.ndim - 1) + part["bias"].shape)
