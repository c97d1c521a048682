"""The short depthwise convolution before a mixer with a running state, with an activation (SiLU).

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `K` width, `C` channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.states import paths

Array = jax.Array


class Convolution(nnx.Module):
    """`silu(bias + sum over k of taps[:, k] * input k)`, over a token and the K - 1 tokens before it on its path.

    Its taps are `[C, K, 1]`, the token's own last: files hold them as `[C, 1, K]`."""

    def __init__(self, channels: int, width: int, bias: bool, dtype: Any, rngs: nnx.Rngs):
        scale = jnp.asarray(width**-0.5, dtype)
        self.taps = nnx.Param(jax.random.uniform(rngs.params(), (channels, width, 1), dtype, -scale, scale))
        if bias:
            self.bias = nnx.Param(jnp.zeros((channels,), dtype))

    def __call__(self, window: Array, past: Array | None, own: Array, ancestors: paths.Ancestors) -> Array:
        """`[B, T, C]` float32.

        Args:
          window: `[B, K - 1, C]`, the last committed inputs.
          past: `[B, P, C]`, the inputs of uncommitted tokens; None: there are none.
          own: `[B, T, C]`, those of the block.
          ancestors: of the block's tokens.
        """
        taps = self.taps[...][:, :, 0].T.astype(jnp.float32)
        mixed = paths.convolved(taps, window, paths.every(past, own), ancestors)
        bias = getattr(self, "bias", None)
        return jax.nn.silu(mixed if bias is None else mixed + bias[...].astype(jnp.float32)[None, None])
