"""A gated short convolution (LFM2, huggingface.co/LiquidAI): `out(C * conv(B * x))`, without an activation.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `M` tokens of a path, `E` width, `K` width of the
convolution.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.lm import Block
from specjax.models.linear import Linear
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.states import paths

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ShortConvConfig(StateMixerConfig):
    """The short convolution of a layer. Its state is the window: the last K - 1 inputs of the convolution.

    Attributes:
      kernel_size: K.
      bias: whether the convolution and both products have biases.
    """

    name: ClassVar[str] = "short_conv"

    kernel_size: int = 3
    bias: bool = False

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "ShortConv":
        return ShortConv(self, width, dtype, rngs)

    def init(self, width: int, batch: int, dtype: Any) -> Array:
        """`[B, K - 1, E]` float32 zeros."""
        return jnp.zeros((batch, self.kernel_size - 1, width), jnp.float32)

    def commit(self, state: Array, delta: Array, count: Array) -> Array:
        return paths.moved(state, delta, count)


class ShortConv(Mixer):
    """See `ShortConvConfig`."""

    def __init__(self, config: ShortConvConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.inputs = linear(width, 3 * width)
        self.conv = nnx.Param(jnp.zeros((config.kernel_size, width), dtype))
        if config.bias:
            self.conv_bias = nnx.Param(jnp.zeros((width,), dtype))
        self.outputs = linear(width, width)
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta holds the convolution's inputs `[B, T, E]`."""
        size, before = self.config.kernel_size - 1, 0 if past is None else past.shape[1]
        first, second, third = jnp.split(self.inputs(x), 3, axis=2)
        own = (first * third).astype(jnp.float32)
        window = jnp.zeros((len(x), size, x.shape[2]), jnp.float32) if cache is None else cache
        ancestors = paths.ancestors(block, before)
        mixed = paths.convolved(self.conv[...].astype(jnp.float32), window, paths.every(past, own), ancestors)
        mixed = mixed + self.conv_bias[...].astype(jnp.float32) if self.config.bias else mixed
        return self.outputs((second * mixed).astype(x.dtype)), own
