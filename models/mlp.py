"""MLPs: the gated one of the Llama family, and the plain one of older models."""

import dataclasses
import functools
import statistics
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.linear import Linear

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2", "xielu"]
ACTIVATIONS = {
    "silu": nnx.silu,
    "gelu_pytorch_tanh": functools.partial(nnx.gelu, approximate=True),
    "gelu": functools.partial(nnx.gelu, approximate=False),
    "relu": nnx.relu,
    "relu2": lambda x: jnp.square(nnx.relu(x)),
}
"""Activations by Hugging Face's names. `gelu_pytorch_tanh` is the tanh approximation of GELU, `relu2` the square of ReLU.
`xielu` is a module; see `XIELU`."""


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """An MLP; names follow Hugging Face's `config.json`.

    Attributes:
      intermediate_size: its inner width.
      hidden_act: the activation, which is that of the gate if there is one.
      bias: whether its products have biases.
      gated: whether the activation of a third product multiplies the inner vector.
      sparsity: the share of that product's numbers that are cut off before the activation; see `cut_off`. 0: none are.
      factors: the factors of that product, and of the output (Falcon-H1).
    """

    intermediate_size: int
    hidden_act: Activation = "silu"
    bias: bool = False
    gated: bool = True
    sparsity: float = 0.0
    factors: tuple[float, float] = (1.0, 1.0)

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, outputs: int | None = None) -> "MLP":
        """The module, for a model of `width`. `outputs` is the width of its output where that is not the model's."""
        return MLP(self, width, dtype, rngs, outputs)

    @property
    def dense(self) -> "MLPConfig":
        """Itself; see `specjax.models.experts.ExpertsConfig`."""
        return self


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate. The gate may read another vector, `gating`.

    The pass (`block`) changes nothing here; see `specjax.models.layer.FeedConfig`."""

    def __init__(self, config: MLPConfig, width: int, dtype: Any, rngs: nnx.Rngs, outputs: int | None = None):
        linear = functools.partial(Linear, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.gated = config.gated
        if config.gated:
            self.gate = linear(width, config.intermediate_size)
        self.up = linear(width, config.intermediate_size)
        self.down = linear(config.intermediate_size, outputs or width)
        self.hidden_act, self.sparsity, self.factors = config.hidden_act, config.sparsity, config.factors
        if config.hidden_act == "xielu":
            self.act = XIELU(dtype)

    def __call__(self, x, gating=None, block=None):
        act = self.act if self.hidden_act == "xielu" else ACTIVATIONS[self.hidden_act]
        if not self.gated:
            return self.down(act(self.up(x)))
        scaled = lambda x, by: x if by == 1 else x * jnp.asarray(by, x.dtype)
        gate = scaled(self.gate(x if gating is None else gating), self.factors[0])
        gate = cut_off(gate, self.sparsity) if self.sparsity else gate
        return scaled(self.down(act(gate) * self.up(x)), self.factors[1])

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.down,)


def cut_off(x, share: float):
    """How far the numbers of each vector `[..., F]` are above a bound, and 0 below it (statistical top-k, You et al.
    2025, arXiv:2506.06644, as Gemma 3n has it).

    The share of a normal distribution, of the vector's mean and standard deviation, is below that bound.
    """
    deviations = statistics.NormalDist().inv_cdf(share)
    bound = jnp.mean(x, axis=-1, keepdims=True) + deviations * jnp.std(x, axis=-1, keepdims=True)
    return nnx.relu(x - bound)


class XIELU(nnx.Module):
    """The activation xIELU (Huang and Schlag 2024, arXiv:2411.13010, section 3): a parabola above zero, an exponential below.
    Files hold its slope at zero and its bound beside the two curvatures that are learned."""

    def __init__(self, dtype: Any):
        curvature = lambda value: nnx.Param(jnp.log(jnp.expm1(jnp.full((1,), value, jnp.float32))).astype(dtype))
        self.alpha_p, self.alpha_n = curvature(0.8), curvature(0.3)
        self.beta, self.eps = nnx.Param(jnp.asarray(0.5, dtype)), nnx.Param(jnp.asarray(-1e-6, dtype))

    def __call__(self, x):
        wide = lambda param: jnp.reshape(param[...].astype(x.dtype), (1,) * x.ndim)
        beta, eps = wide(self.beta), wide(self.eps)
        above, below = jax.nn.softplus(wide(self.alpha_p)), beta + jax.nn.softplus(wide(self.alpha_n))
        curved = jnp.where(x > 0, above * x * x, (jnp.expm1(jnp.minimum(x, eps)) - x) * below)
        return curved + beta * x
