"""Encoders: they read a source from both sides, once, before a decoder's text begins.

Shapes: `B` rows, `S` source slots, `F` features of a frame, `E` width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.tree_attention import Implementation
from specjax.lm import Block, Source
from specjax.models.distances import DistancesConfig
from specjax.models.embedding import EmbeddingConfig, entered, positions_of
from specjax.models.layer import LayerConfig
from specjax.models.norms import NormConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class FramesConfig:
    """How frames of features become an encoder's input: two convolutions of three frames, the second of which halves their
    number (Whisper, Radford et al. 2022, arXiv:2212.04356, section 2.2).

    Attributes:
      features: F.
      slots: how many slots a source has after them.
    """

    features: int
    slots: int


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """An encoder, of the decoder's width.

    Attributes:
      layers: from the first to the last; their attention sees the whole source.
      embedding: how its tokens are embedded; of frames, only positions and norm are read.
      norm: the norm after the last layer; None: there is none.
      shared: whether its tokens are those of the decoder, by the same table.
      frames: how it reads frames of features; None: it reads tokens.
      distances: numbers added to scores by distance; None: there are none.
      longest: the most slots of a source; None: any number.
    """

    layers: tuple[LayerConfig, ...]
    embedding: EmbeddingConfig
    norm: NormConfig | None = None
    shared: bool = True
    frames: FramesConfig | None = None
    distances: DistancesConfig | None = None
    longest: int | None = None

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None) -> "Encoder":
        """The module."""
        return Encoder(self, width, dtype, rngs, kernel)

    def slots(self, capacity: int) -> int:
        """How many slots a cache has for the source of a text of up to `capacity` tokens."""
        return capacity if self.frames is None else self.frames.slots


class Convolution(nnx.Module):
    """A convolution of three frames, from `[B, S, F]` to `[B, S / stride, E]`."""

    def __init__(self, features: int, width: int, stride: int, dtype: Any, rngs: nnx.Rngs):
        self.filter = nnx.Param(nnx.initializers.lecun_normal(1, 0)(rngs.params(), (width, features, 3), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        found = jax.lax.conv_general_dilated(
            x.astype(self.filter.dtype), self.filter[...], (self.stride,), [(1, 1)],
            dimension_numbers=("NWC", "OIW", "NWC"), preferred_element_type=jnp.float32,
        )  # fmt: skip
        return found + self.bias[...].astype(jnp.float32)[None, None]


class Frames(nnx.Module):
    """See `FramesConfig`."""

    def __init__(self, config: FramesConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        self.conv1 = Convolution(config.features, width, 1, dtype, rngs)
        self.conv2 = Convolution(width, width, 2, dtype, rngs)

    def __call__(self, frames: Array) -> Array:
        """`[B, S, E]` from frames `[B, 2 S, F]`."""
        gelu = functools.partial(nnx.gelu, approximate=False)
        return gelu(self.conv2(gelu(self.conv1(frames))))


class Encoder(nnx.Module):
    """See `EncoderConfig`."""

    def __init__(
        self, config: EncoderConfig, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None
    ):
        c = config
        if c.frames is not None:
            self.frames = Frames(c.frames, width, dtype, rngs)
        elif not c.shared:
            self.embed = nnx.Embed(c.embedding.vocab_size, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        if (table := positions_of(c.embedding, width, dtype, rngs)) is not None:
            self.positions = table
        if c.embedding.norm is not None:
            self.embed_norm = c.embedding.norm.build(width, dtype)
        self.layers = nnx.List([layer.build(width, dtype, rngs, kernel) for layer in c.layers])
        if c.norm is not None:
            self.norm = c.norm.build(width, dtype)
        if c.distances is not None:
            self.distances = c.distances.build(dtype)
        self.config = c

    def __call__(self, source: Source, embed: Any) -> tuple[Array, Array]:
        """The states `[B, S, E]` of a source, and how many of a row's are its own, `[B]`.

        Args:
          source: the source; slots after a row's end have no effect.
          embed: a function from tokens `[B, S]` to embeddings `[B, S, E]`.

        Raises:
          ValueError: if it has another number of frames or features.
        """
        c = self.config
        if c.frames is not None and source.inputs.shape[1:] != (2 * c.frames.slots, c.frames.features):
            raise ValueError(
                f"a source is {2 * c.frames.slots} frames of {c.frames.features} features, not {source.inputs.shape[1:]}: pad "
                "or cut it (transformers' feature extractor does, and gives [F, S])"
            )
        h = embed(source.inputs) if c.frames is None else self.frames(source.inputs).astype(jnp.float32)
        lengths = source.lengths if c.frames is None else jnp.full_like(source.lengths, h.shape[1])
        positions = jnp.broadcast_to(jnp.arange(h.shape[1], dtype=jnp.int32)[None], h.shape[:2])
        h = entered(self, c.embedding, h, positions)
        real = positions < lengths[:, None]
        block = Block(positions, positions, jnp.zeros_like(lengths), real[:, None], causal=False)
        tables = None if c.distances is None else self.distances()
        for layer in self.layers:
            h, _ = layer(h, tables, block, None, None, positions)
        return (h if c.norm is None else self.norm(h)), lengths
