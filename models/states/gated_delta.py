"""Gated delta net (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and Qwen3.5: one decay for each value head.

Shapes: see `specjax.models.states.delta_rule`.
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
class GatedDeltaConfig(DeltaRuleConfig):
    """The gated delta net of a layer."""

    name: ClassVar[str] = "gated_delta"
    called: ClassVar[str] = "gated delta nets"

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "GatedDelta":
        return GatedDelta(self, width, dtype, rngs)


class GatedDelta(DeltaRule):
    """Of a token x: `beta = sigmoid(strength(x))`, `g = -e^rate softplus(decay(x) + shift)`; outputs are normed, and then
    multiplied by `silu(output_gate(x))`."""

    def __init__(self, config: GatedDeltaConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, width, dtype, rngs)
        heads = config.num_value_heads
        linear = functools.partial(Linear, width, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.strength, self.decay = linear(heads), linear(heads)
        self.rate, self.shift = nnx.Param(jnp.zeros((heads,), jnp.float32)), nnx.Param(jnp.ones((heads,), jnp.float32))
        self.output_gate = linear(heads * config.value_head_dim)
        self.norm = NormConfig(config.eps, "wide").build(config.value_head_dim, dtype)

    def rates(self, x: Array) -> tuple[Array, Array]:
        x, served = apart(x), self.config.served
        strength, decay = (by_heads(one(x), served).astype(jnp.float32) for one in (self.strength, self.decay))
        rate, shift = (one[...].reshape(1, 1, -1, self.config.served) for one in (self.rate, self.shift))
        return nnx.sigmoid(strength), (-jnp.exp(rate) * nnx.softplus(decay + shift))[..., None]

    def gated(self, out: Array, x: Array) -> Array:
        gate = by_heads(self.output_gate(x), self.config.value_head_dim)
        return self.norm(out) * nnx.silu(gate.astype(jnp.float32))
