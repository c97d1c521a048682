"""Gemma 4's experts, which run beside a layer's MLP and read the residual stream directly.

Shapes: `M` tokens of all rows, `E` width, `X` experts, `k` experts per token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.experts import ExpertsConfig, Kernel, mixed, of_ranks
from specjax.models.grouped import grouped_dot
from specjax.models.linear import Linear
from specjax.models.norms import RMSNorm, rms_norm

Array = jax.Array


def linear(inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs) -> Linear:
    """A product without a bias."""
    return Linear(inputs, outputs, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)


class Router(nnx.Module):
    """Chooses each token's experts and their weights; of `config` only the number of experts and the ranks count."""

    def __init__(self, config: ExpertsConfig, width: int, eps: float, dtype: Any, rngs: nnx.Rngs):
        experts = config.num_experts
        self.proj = linear(width, experts, dtype, rngs)
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((experts,), dtype))
        self.config, self.eps = config, eps

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """The weights and experts, `[M, k]` each, of tokens `[M, E]`."""
        scores = self.proj(rms_norm(x, None, self.eps) * self.scale[...][None] * x.shape[-1] ** -0.5)
        weights, experts = of_ranks(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), self.config)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights * self.per_expert_scale[...][experts].astype(jnp.float32), experts


class Experts(nnx.Module):
    """Gated MLPs, each over the tokens that chose it; see `specjax.models.experts.mixed`."""

    def __init__(self, width: int, experts: int, inner: int, dtype: Any, rngs: nnx.Rngs):
        self.gate_up = Kernel((experts, width, 2 * inner), dtype, rngs)
        self.down = Kernel((experts, inner, width), dtype, rngs)

    def __call__(self, x: Array, weights: Array, experts: Array) -> Array:
        """Tokens `[M, E]` through their experts `[M, k]`, summed by weight."""
        return mixed(self, x, weights, experts)

    def mlp(self, x: Array, sizes: Array) -> Array:
        """Tokens sorted by expert, `sizes` `[X]` of which each has."""
        gate, up = jnp.split(grouped_dot(x, self.gate_up.kernel.get_value(), sizes), 2, axis=-1)
        return grouped_dot(nnx.gelu(gate) * up, self.down.kernel.get_value(), sizes)


class Beside(nnx.Module):
    """The experts beside the MLP of a `specjax.models.llama` layer; the norms have Hugging Face's names."""

    def __init__(self, experts: ExpertsConfig, width: int, eps: float, dtype: Any, rngs: nnx.Rngs):
        norm = lambda: RMSNorm(width, eps, dtype, "wide")
        self.router = Router(experts, width, eps, dtype, rngs)
        self.experts = Experts(width, experts.num_experts, experts.moe_intermediate_size, dtype, rngs)
        self.pre_feedforward_layernorm_2 = norm()
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()


def with_experts(own: Any, x: Array, dense: Array) -> Array:
    """The output of an MLP combined with the output of the layer's experts.

    Args:
      own: a module with the attributes of `Beside`.
      x: `[B, T, E]`, the residual stream before the MLP.
      dense: `[B, T, E]`, the MLP's output.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = (both[:, : own.router.config.main] for both in own.router(flat))
    chosen = own.experts(own.pre_feedforward_layernorm_2(flat), weights, experts).reshape(x.shape)
    return own.post_feedforward_layernorm_1(dense) + own.post_feedforward_layernorm_2(chosen)
