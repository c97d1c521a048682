"""Falcon's draft layer (Gao et al. 2024, arXiv:2412.12639): EAGLE's, with an LSTM of two layers in place of `fc`.

Pairs are EAGLE's; they come in blocks. Shapes: `B` rows, `T` pairs, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleHead, EagleLayer
from specjax.models.model_config import ModelConfig

Array = jax.Array


class Cells(nnx.Module):
    """A layer of the LSTM, which begins empty in every block, or at every pair.

    The parts of its sums are the input gate, the forget gate, the candidate and the output gate.
    """

    def __init__(self, inputs: int, width: int, block: int, carries: bool, dtype: Any, rngs: nnx.Rngs):
        bound = width**-0.5  # the authors begin with torch's numbers
        drawn = lambda key, shape, dtype=dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
        made = {"param_dtype": dtype, "dtype": dtype, "kernel_init": drawn, "bias_init": drawn, "rngs": rngs}
        self.enter = nnx.Linear(inputs, 4 * width, **made)
        if carries:
            self.recur = nnx.Linear(width, 4 * width, use_bias=False, **made)
        self.steps = range(1, block) if carries else ()

    def __call__(self, x: Array, places: Array) -> Array:
        """States `[B, T, E]` of pairs; `places` `[B, T]` are those in their blocks."""
        sums = self.enter(x)
        state, cell = _gated(sums, None)
        before = lambda y: jnp.pad(y[:, :-1], ((0, 0), (1, 0), (0, 0)))
        for place in self.steps:
            new = _gated(sums + self.recur(before(state)), before(cell))
            state, cell = (
                jnp.where((places == place)[..., None], a, b) for a, b in zip(new, (state, cell), strict=True)
            )
        return state


def _gated(sums: Array, cell: Array | None) -> tuple[Array, Array]:
    """The state and the cell, from sums `[B, T, 4 E]` and the cell before; None for an empty one."""
    enter, forget, candidate, leave = jnp.split(sums, 4, axis=-1)
    new = jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    new = new if cell is None else new + jax.nn.sigmoid(forget) * cell
    return jax.nn.sigmoid(leave) * jnp.tanh(new), new


class Falcon(nnx.Module):
    """The LSTM over embedding and feature, then EAGLE's layer."""

    def __init__(self, config: ModelConfig, block: int, carries: bool, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        cells = lambda inputs: Cells(inputs, width, block, carries, dtype, rngs)
        self.lstm = nnx.List([cells(2 * width), cells(width)])
        self.layer = EagleLayer(config, dtype, rngs)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions, places):
        x = jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1)
        for cells in self.lstm:
            x = cells(x, places)
        x, kv = self.layer(x, rope, block, caches[0], pasts[0], positions)
        return x, [kv]


@dataclasses.dataclass(frozen=True)
class FalconHead(EagleHead):
    """The module as functions of a params pytree.

    Attributes:
      block: pairs per block.
      carries: whether the LSTM goes on from pair to pair of a block.
    """

    block: int = 2
    carries: bool = False

    def _module(self, dtype, rngs) -> nnx.Module:
        return Falcon(self.config, self.block, self.carries, dtype, rngs)
