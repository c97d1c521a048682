"""BlockFFN (Song et al. 2025, arXiv:2507.08771, section 3.1): an MLP in blocks of columns, the experts, each with a weight.

A token's weights are `norm(relu(router(x)))`. Most are exactly 0, and how many are not differs from token to token. There is no
gate: `down(silu(up(x)) * weights)`, each weight repeated over its expert's columns.

Shapes: `B` rows, `T` block tokens, `E` width, `X` experts.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from specjax.kernels.union_mlp import union_mlp
from specjax.kernels.union_mlp.api import MOST_ROWS
from specjax.models.few_bits import is_quantised
from specjax.models.linear import Linear
from specjax.models.mlp import MLPConfig
from specjax.models.norms import NormConfig

Array = jax.Array

_listeners: contextvars.ContextVar[list[Array] | None] = contextvars.ContextVar("router_logits", default=None)


@contextlib.contextmanager
def router_logits() -> Iterator[list[Array]]:
    """A list to which every BlockFFN that is called inside adds its router's logits `[B, T, X]`, before the ReLU.

    The layers of one pass add theirs in order. It is for losses: a pass for text has no use for them, so they are no part of
    a model's output. Pass and list belong to the same trace."""
    found: list[Array] = []
    token = _listeners.set(found)
    try:
        yield found
    finally:
        _listeners.reset(token)


@dataclasses.dataclass(frozen=True)
class BlockFFNConfig:
    """A BlockFFN; names follow the published `config.json`.

    Attributes:
      num_experts: X.
      expert_size: the columns of an expert.
      norm: of a token's weights.
      capacity: the most experts of a step's rows together for which only those are read; see
        `specjax.kernels.union_mlp`. None: half of all.
    """

    num_experts: int
    expert_size: int
    norm: NormConfig = NormConfig()
    capacity: int | None = None

    @property
    def dense(self) -> MLPConfig:
        """An MLP of the same width, without a gate."""
        return MLPConfig(self.num_experts * self.expert_size, gated=False)

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "BlockFFN":
        """The module, for a model of `width`."""
        return BlockFFN(self, width, dtype, rngs)


def blocks_of(config: Any) -> BlockFFNConfig:
    """The BlockFFN of a `ModelConfig`'s layers, of the first that has one.

    Raises:
      ValueError: if none has.
    """
    found = next((layer.feed for layer in config.layers if isinstance(layer.feed, BlockFFNConfig)), None)
    if found is None:
        raise ValueError("no layer of this model is a BlockFFN, so it has no routers whose experts could be few")
    return found


class Blocks(nnx.Module):
    """The columns of all experts side by side."""

    def __init__(self, config: BlockFFNConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        inner = config.num_experts * config.expert_size
        self.up, self.down = linear(width, inner), linear(inner, width)
        self.capacity = config.capacity

    def __call__(self, x: Array, weights: Array) -> Array:
        """Tokens `[B, T, E]` and their weights `[B, T, X]` to `[B, T, E]`.

        All tokens of a step share one union of experts. Matrices of few bits, and long inputs, are multiplied whole."""
        up, down = self.up.kernel.get_value(), self.down.kernel.get_value()
        rows = x.shape[0] * x.shape[1]
        if rows > MOST_ROWS or is_quantised(up) or is_quantised(down):
            inner = nnx.silu(self.up(x)).reshape(*weights.shape, -1)
            return self.down((inner * weights[..., None]).reshape(*x.shape[:-1], -1))
        flat = lambda x: x.reshape(rows, -1)
        return union_mlp(flat(x), flat(weights), up, down, capacity=self.capacity).reshape(x.shape)


class BlockFFN(nnx.Module):
    """See the module; `router_logits` gives a loss what its router says."""

    def __init__(self, config: BlockFFNConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        self.router = Linear(width, config.num_experts, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.router_norm = config.norm.build(config.num_experts, dtype)
        self.blocks = Blocks(config, width, dtype, rngs)

    def __call__(self, x: Array, block: Any = None) -> Array:
        """`[B, T, E]` to `[B, T, E]`; every token by itself, whatever the pass."""
        logits = self.router(x)
        if (found := _listeners.get()) is not None:
            found.append(logits)
        return self.blocks(x, self.router_norm(nnx.relu(logits)))

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.blocks.down,)
