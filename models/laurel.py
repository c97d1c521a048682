"""A branch of low rank beside a token mixer: LAuReL (Menghani et al. 2024, arXiv:2411.07501), as Gemma 3n has it."""

from typing import Any

import jax
from flax import nnx

from specjax.models.gemma_experts import linear
from specjax.models.norms import NormConfig

Array = jax.Array


class Laurel(nnx.Module):
    """Adds to its input `[B, T, E]` the norm of a product of rank `rank`; `size` is E."""

    def __init__(self, rank: int, size: int, norm: NormConfig, dtype: Any, rngs: nnx.Rngs):
        self.left = linear(size, rank, dtype, rngs)
        self.right = linear(rank, size, dtype, rngs)
        self.norm = norm.build(size, dtype)

    def __call__(self, x: Array) -> Array:
        return x + self.norm(self.right(self.left(x)))
