"""MLPs: the gated one of the Llama family, and the plain one of older models."""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from specjax.models.linear import Linear

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"]
ACTIVATIONS = {
    "silu": nnx.silu,
    "gelu_pytorch_tanh": functools.partial(nnx.gelu, approximate=True),
    "gelu": functools.partial(nnx.gelu, approximate=False),
    "relu": nnx.relu,
    "relu2": lambda x: jnp.square(nnx.relu(x)),
}
"""Activations by Hugging Face's names. `gelu_pytorch_tanh` is the tanh approximation of GELU, `relu2` the square of ReLU."""


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """An MLP; names follow Hugging Face's `config.json`.

    Attributes:
      intermediate_size: its inner width.
      hidden_act: the activation, which is that of the gate if there is one.
      bias: whether its products have biases.
      gated: whether the activation of a third product multiplies the inner vector.
    """

    intermediate_size: int
    hidden_act: Activation = "silu"
    bias: bool = False
    gated: bool = True

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "MLP":
        """The module, for a model of `width`."""
        return MLP(self, width, dtype, rngs)

    @property
    def dense(self) -> "MLPConfig":
        """Itself; see `specjax.models.experts.ExpertsConfig`."""
        return self


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate."""

    def __init__(self, config: MLPConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.gated = config.gated
        if config.gated:
            self.gate = linear(width, config.intermediate_size)
        self.up = linear(width, config.intermediate_size)
        self.down = linear(config.intermediate_size, width)
        self.hidden_act = config.hidden_act

    def __call__(self, x):
        act = ACTIVATIONS[self.hidden_act]
        return self.down(act(self.gate(x)) * self.up(x) if self.gated else act(self.up(x)))

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.down,)
