"""The gated MLP of the Llama family."""

import dataclasses
import functools
from typing import Any, Literal

from flax import nnx

from specjax.models.linear import Linear

Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS = {"silu": nnx.silu, "gelu_pytorch_tanh": functools.partial(nnx.gelu, approximate=True)}
"""Activations by Hugging Face's names; the second is the tanh approximation of GELU."""


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A gated MLP; names follow Hugging Face's `config.json`.

    Attributes:
      intermediate_size: its inner width.
      hidden_act: the activation of the gate.
      bias: whether its three products have biases.
    """

    intermediate_size: int
    hidden_act: Activation = "silu"
    bias: bool = False

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "MLP":
        """The module, for a model of `width`."""
        return MLP(self, width, dtype, rngs)

    @property
    def dense(self) -> "MLPConfig":
        """Itself; see `specjax.models.experts.ExpertsConfig`."""
        return self


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: MLPConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.gate = linear(width, config.intermediate_size)
        self.up = linear(width, config.intermediate_size)
        self.down = linear(config.intermediate_size, width)
        self.hidden_act = config.hidden_act

    def __call__(self, x):
        return self.down(ACTIVATIONS[self.hidden_act](self.gate(x)) * self.up(x))

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.down,)
