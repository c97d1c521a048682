"""The convolutions that DFlash 2 has around all sublayers (z-lab/dflash).

Shapes: `B` rows, `T` slots, `E` width, `G` groups of channels.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import Attention, AttentionConfig
from specjax.models.mlp import MLP, MLPConfig
from specjax.models.model_config import ModelConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig:
    """A grouped dynamic convolution over the slots of a block.

    Attributes:
      reach: how many slots an output reads: its own, and those before it in its block.
      group: how many channels share the coefficients that depend on the slot.
      block: slots of a block.
    """

    reach: int = 2
    group: int = 16
    block: int = 8

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "Convolution":
        """The module, for a model of `width`. At first its outputs are its inputs."""
        return Convolution(self, width, dtype, rngs)


class Convolution(nnx.Module):
    """The two convolutions around a sublayer: of its input (`side` 0) and of its output (1).

    Output t is the sum over s of `(base[side, s] + c_t[side, s]) * input_{t - s}`, where slots before the block are
    zero. The coefficients c are linear in the sublayer's normed input at t, for both sides.
    """

    def __init__(self, config: ConvolutionConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.base = nnx.Param(jnp.zeros((2, config.reach, width), dtype).at[:, 0].set(1))
        self.projection = nnx.Linear(
            width, 2 * config.reach * (width // config.group), use_bias=False, kernel_init=nnx.initializers.zeros,
            param_dtype=dtype, dtype=dtype, rngs=rngs,
        )  # fmt: skip

    def coefficients(self, x: Array) -> Array:
        """`[B, T, 2, reach, G]`, from the sublayer's normed input `[B, T, E]`."""
        return self.projection(x).reshape(*x.shape[:2], 2, self.config.reach, -1)

    def __call__(self, x: Array, coefficients: Array, side: int) -> Array:
        """`[B, T, E]` of one side, from the same; T is a multiple of the block."""
        block, group = self.config.block, self.config.group
        blocks = x.reshape(len(x), -1, block, x.shape[-1] // group, group)
        own = coefficients[:, :, side].reshape(*blocks.shape[:3], self.config.reach, -1, 1)
        base = self.base[...][side].reshape(self.config.reach, 1, 1, 1, -1, group)
        made = jnp.zeros_like(blocks)
        for back in range(self.config.reach):
            earlier = jnp.pad(blocks[:, :, : block - back], ((0, 0), (0, 0), (back, 0), (0, 0), (0, 0)))
            made += (base[back] + own[:, :, :, back]) * earlier
        return made.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class ConvolvedAttentionConfig(AttentionConfig):
    """Attention between two convolutions."""

    around: ConvolutionConfig = ConvolutionConfig()

    def build(self, width, dtype, rngs, kernel=None, inputs=None):
        return ConvolvedAttention(self, width, dtype, rngs, kernel, inputs)


class ConvolvedAttention(Attention):
    """See `ConvolvedAttentionConfig`."""

    def __init__(self, config: ConvolvedAttentionConfig, width, dtype, rngs, kernel=None, inputs=None):
        super().__init__(config, width, dtype, rngs, kernel, inputs)
        self.convolution = config.around.build(width, dtype, rngs)

    def __call__(self, x, rope, block, cache, past, positions, shared=None):
        own = self.convolution.coefficients(x)
        mixed, delta = super().__call__(self.convolution(x, own, 0), rope, block, cache, past, positions, shared)
        return self.convolution(mixed, own, 1), delta


@dataclasses.dataclass(frozen=True)
class ConvolvedMLPConfig(MLPConfig):
    """An MLP between two convolutions."""

    around: ConvolutionConfig = ConvolutionConfig()

    def build(self, width, dtype, rngs, outputs=None):
        return ConvolvedMLP(self, width, dtype, rngs, outputs)


class ConvolvedMLP(MLP):
    """See `ConvolvedMLPConfig`."""

    def __init__(self, config: ConvolvedMLPConfig, width, dtype, rngs, outputs=None):
        super().__init__(config, width, dtype, rngs, outputs)
        self.convolution = config.around.build(width, dtype, rngs)

    def __call__(self, x, gating=None, block=None):
        own = self.convolution.coefficients(x)
        return self.convolution(super().__call__(self.convolution(x, own, 0), gating), own, 1)


def convolved(config: ModelConfig, around: ConvolutionConfig) -> ModelConfig:
    """The config with convolutions around the attention and the MLP of every layer."""
    kinds = {AttentionConfig: ConvolvedAttentionConfig, MLPConfig: ConvolvedMLPConfig}
    for kind, wrapped in kinds.items():
        config = config.mapped(kind, lambda part, wrapped=wrapped: wrapped(**_fields(part), around=around))
    return config


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
