"""Kimi delta attention (Kimi-Linear, arXiv:2510.26692): the gated delta rule with a decay for each key channel.

Shapes: see `specjax.models.states.delta_rule`; every key head serves one value head.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.linear import Linear, apart, by_heads
from specjax.models.norms import NormConfig
from specjax.models.states.delta_rule import DeltaRule, DeltaRuleConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class KimiDeltaConfig(DeltaRuleConfig):
    """The Kimi delta attention of a layer."""

    name: ClassVar[str] = "kimi_delta"
    called: ClassVar[str] = "Kimi delta attention"
    chunk: ClassVar[int] = 16  # a token's decays towards its ancestors take K numbers for each of them

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "KimiDelta":
        return KimiDelta(self, width, dtype, rngs)


class KimiDelta(DeltaRule):
    """Of a token x: `beta = sigmoid(strength(x))`, `g = -e^head_rate softplus(decay(decay_inner(x)) + shift)`; outputs are
    normed, and then multiplied by `sigmoid(output_gate(gate_inner(x)))`."""

    def __init__(self, config: KimiDeltaConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        if (config.served, config.key_head_dim) != (1, config.value_head_dim):
            raise ValueError("Kimi delta attention has as many value heads as key heads, of the same width")
        super().__init__(config, width, dtype, rngs)
        heads, size = config.num_value_heads, config.key_head_dim
        linear = functools.partial(Linear, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.strength = linear(width, heads)
        self.decay_inner, self.decay = linear(width, size), linear(size, heads * size)
        self.head_rate = nnx.Param(jnp.zeros((1, 1, heads, 1), jnp.float32))
        self.shift = nnx.Param(jnp.ones((heads * size,), jnp.float32))
        self.gate_inner, self.output_gate = linear(width, size), linear(size, heads * size)
        self.norm = NormConfig(config.eps, "wide").build(size, dtype)

    def rates(self, x: Array) -> tuple[Array, Array]:
        size = self.config.key_head_dim
        decay = by_heads(self.decay(self.decay_inner(x)), size).astype(jnp.float32)
        shift = self.shift[...].reshape(1, 1, -1, size)
        decay = -jnp.exp(self.head_rate[...]) * nnx.softplus(decay + shift)
        return nnx.sigmoid(self.strength(apart(x)).astype(jnp.float32))[..., None], decay[:, :, :, None]

    def gated(self, out: Array, x: Array) -> Array:
        gate = by_heads(self.output_gate(self.gate_inner(x)), self.config.value_head_dim)
        return self.norm(out) * nnx.sigmoid(gate.astype(jnp.float32))
