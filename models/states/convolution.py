"""The short depthwise convolution of a mixer with a running state.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `K` width, `C` channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.states import paths

Array = jax.Array


class Convolution(nnx.Module):
    """`bias + sum over k of taps[k] * input k`, over a token and the K - 1 tokens before it on its path, in float32.

    Its taps are `[K, C]`, the token's own last: files hold them as `[C, 1, K]`. They always keep their type, so that they are
    called `taps`, not `kernel`."""

    def __init__(self, channels: int, width: int, bias: bool, dtype: Any, rngs: nnx.Rngs):
        scale = jnp.asarray(width**-0.5, dtype)
        self.taps = nnx.Param(jax.random.uniform(rngs.params(), (width, channels), dtype, -scale, scale))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype)) if bias else None

    def __call__(self, window: Array, past: Array | None, own: Array, ancestors: paths.Ancestors) -> Array:
        """`[B, T, C]` float32.

        Args:
          window: `[B, K - 1, C]`, the last committed inputs.
          past: `[B, P, C]`, the inputs of uncommitted tokens; None: there are none.
          own: `[B, T, C]`, those of the block.
          ancestors: of the block's tokens.
        """
        mixed = paths.convolved(self.taps[...].astype(jnp.float32), window, paths.every(past, own), ancestors)
        return mixed if self.bias is None else mixed + self.bias[...].astype(jnp.float32)[None, None]
