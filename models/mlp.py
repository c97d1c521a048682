"""The gated MLP of the Llama family."""

import functools
from typing import Any, Literal

from flax import nnx

from specjax.models.linear import Linear

Activation = Literal["silu", "gelu_pytorch_tanh"]
ACTIVATIONS = {"silu": nnx.silu, "gelu_pytorch_tanh": functools.partial(nnx.gelu, approximate=True)}
"""By Hugging Face's names; the second is GELU by a tanh."""


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`; `inner` is its inner width, where that is not the config's."""

    def __init__(self, config: Any, dtype: Any, rngs: nnx.Rngs, inner: int | None = None):
        inner = inner or config.intermediate_size
        linear = functools.partial(Linear, use_bias=config.mlp_bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.gate = linear(config.hidden_size, inner)
        self.up = linear(config.hidden_size, inner)
        self.down = linear(inner, config.hidden_size)
        self.hidden_act = config.hidden_act

    def __call__(self, x):
        return self.down(ACTIVATIONS[self.hidden_act](self.gate(x)) * self.up(x))
