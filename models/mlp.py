"""The gated MLP of the Llama family."""

import functools
from typing import Any

from flax import nnx


class MLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`; `inner` is its inner width, where that is not the config's."""

    def __init__(self, config: Any, dtype: Any, rngs: nnx.Rngs, inner: int | None = None):
        inner = inner or config.intermediate_size
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.gate = linear(config.hidden_size, inner)
        self.up = linear(config.hidden_size, inner)
        self.down = linear(inner, config.hidden_size)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))
