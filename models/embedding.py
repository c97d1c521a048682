"""The input of a stack's first layer: embeddings, positions and a norm.

Shapes: `B` rows, `T` tokens, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.layer_inputs import LayerInputsConfig
from specjax.models.norms import NormConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PositionsConfig:
    """A table of vectors, one for each position.

    Attributes:
      size: the number of positions.
      offset: the row of position 0.
      sinusoids: whether the vectors are computed: sines, then cosines (Marian). Otherwise they are learned.
    """

    size: int
    offset: int = 0
    sinusoids: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.size + self.offset


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """The embedding of tokens.

    Attributes:
      vocab_size: the number of tokens.
      width: the width of the table; None: the model's. With another width, one matrix follows the table, and one precedes
        the head.
      scale: the factor of embeddings.
      exact: whether that factor is float32, and not rounded to the type of embeddings.
      positions: vectors of positions, which are added to embeddings; None: there are none.
      norm: the norm of the first layer's input; None: it has none.
      layer_inputs: the further inputs of every layer; None: there are none.
      streams: how many residual streams are made of it (`specjax.models.streams`); 0: it is the only one.
    """

    vocab_size: int
    width: int | None = None
    scale: float = 1.0
    exact: bool = False
    positions: PositionsConfig | None = None
    norm: NormConfig | None = None
    layer_inputs: LayerInputsConfig | None = None
    streams: int = 0


def positions_of(config: EmbeddingConfig, size: int, dtype: Any, rngs: nnx.Rngs) -> nnx.Embed | None:
    """The table of learned positions of a stack of width `size`; None: it has none."""
    table = config.positions
    if table is None or table.sinusoids:
        return None
    return nnx.Embed(table.rows, size, param_dtype=dtype, dtype=dtype, rngs=rngs)


def entered(module: Any, config: EmbeddingConfig, h: Array, positions: Array) -> Array:
    """Embeddings `[B, T, E]` of tokens at `positions` `[B, T]`, with their positions and their norm.

    `module` holds `positions` and `embed_norm`, where the config has them."""
    if config.positions is not None:
        rows = jnp.clip(positions, 0, config.positions.size - 1) + config.positions.offset
        learned = not config.positions.sinusoids
        table = module.positions.embedding[...] if learned else sinusoids(config.positions.rows, h.shape[-1])
        h = h + table.at[rows].get(mode="promise_in_bounds").astype(h.dtype)
    return h if config.norm is None else module.embed_norm(h)


def sinusoids(count: int, width: int) -> Array:
    """`[count, width]` float32: the sines of each position, then the cosines (Vaswani et al. 2017, arXiv:1706.03762,
    section 3.5, with the two kinds apart)."""
    angles = np.arange(count)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    cosines = np.cos(angles)[:, : width // 2]
    return jnp.asarray(np.concatenate([np.sin(angles), cosines], axis=1), jnp.float32)
