"""Rotary embeddings (Su et al. 2021, arXiv:2104.09864): frequencies, tables of angles, and rotations by them."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of a rope's frequencies.

    `longrope` has two sets of factors, and a model uses one of them for all positions. Keys in a cache keep their
    rotation, so a text that outgrew the first training's positions would otherwise mix both sets. Then it would depend
    on how it was cut into passes.

    Attributes:
      kind: `linear` divides positions by `factor`. `llama3` rescales only low frequencies (Llama 3.1, section 3.3).
        `proportional` divides positions and rotates only the fastest pairs of a head (Gemma 4). `yarn` divides low
        frequencies, leaves high ones and blends those between (Peng et al. 2023, arXiv:2309.00071, section 3.2).
        `longrope` divides each frequency by its own factor (Ding et al. 2024, arXiv:2402.13753); see the class.
        `dynamic` leaves frequencies as they are for all positions that the model was made for. Beyond them, its base would
        grow with the text (arXiv:2309.00071, section 3.3), and keys in a cache would need another rotation; see
        `RopeConfig.fixed`.
      factor: see `kind`.
      beta_fast: for `yarn`: pairs with at least so many turns within the first training's positions are unchanged.
      beta_slow: for `yarn`: pairs with at most so many turns are divided.
      truncate: whether the bounds of the pairs between are rounded outwards to whole numbers.
      magnitude: the factor of cosines and sines; scores are multiplied by its square.
      short_magnitude: for `longrope`, the same beside `short_factor`; None: `magnitude`.
      short_factor: for `longrope`, a factor for each pair, used if `max_position_embeddings` is at most
        `original_max_position_embeddings`.
      long_factor: the same, used if it is above.
      rotated: how many of a head's pairs `proportional` rotates; a pair is a channel of a head's first half and its
        counterpart in the second half.
    """

    kind: Literal["linear", "llama3", "proportional", "yarn", "longrope", "dynamic"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rotated: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    short_magnitude: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def is_long(self, longest: int) -> bool:
        """Whether `longrope` has its long factors, for a model that is used for so many positions."""
        return longest > self.original_max_position_embeddings

    def magnitude_of(self, longest: int) -> float:
        """The factor of cosines and sines of such a model."""
        short = self.kind == "longrope" and not self.is_long(longest)
        return self.magnitude if self.short_magnitude is None or not short else self.short_magnitude


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A rope.

    Attributes:
      theta: its base.
      scaling: the scaling of its frequencies; None: none.
      share: the share of a head's channels, from the first, that is rotated.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    share: float = 1.0

    def channels(self, head_dim: int) -> int:
        """How many channels of a head are rotated."""
        return int(head_dim * self.share)

    @property
    def grows(self) -> bool:
        """Whether its base grows with the text, once that is longer than the texts that the model was made for."""
        return self.scaling is not None and self.scaling.kind == "dynamic"

    def fixed(self, head_dim: int, made_for: int, longest: int) -> "RopeConfig":
        """The rope, or in place of a `dynamic` one the rope that this is for a text of `longest` positions, in all of them.

        Args:
          head_dim: how many channels a head has.
          made_for: how many positions the model was made for.
          longest: how many positions it is used for.
        """
        if self.scaling is None or not self.grows:
            return self
        channels, factor = self.channels(head_dim), self.scaling.factor
        stretch = max(1.0, factor * longest / made_for - (factor - 1))
        return RopeConfig(self.theta * stretch ** (channels / (channels - 2)), None, self.share)


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """The factor of queries by their positions: `1 + beta * log(1 + floor((position + first) / period))`.

    Attributes:
      beta: see above.
      period: for so many positions the factor stays the same.
      first: the number of the first position.
    """

    beta: float
    period: int
    first: int = 0

    def at(self, positions: Array) -> Array:
        """The factors at positions of any shape, in float32."""
        return 1 + self.beta * jnp.log1p(((positions + self.first) // self.period).astype(jnp.float32))


def rope_frequencies(rope: RopeConfig, head_dim: int, longest: int) -> Array:
    """The scaled inverse frequencies `[R / 2]`, in float32, of the R channels of a head that are rotated.

    Args:
      rope: the rope.
      head_dim: how many channels a head has.
      longest: how many positions the model is used for.
    """
    channels, scaling = rope.channels(head_dim), rope.scaling
    exponent = jnp.arange(0, channels, 2, dtype=jnp.float32) / max(channels, 1)
    freq = 1.0 / (rope.theta**exponent)
    if scaling is None or rope.grows:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "proportional":
        return jnp.where(jnp.arange(freq.shape[0]) < scaling.rotated, freq, 0.0) / scaling.factor
    if scaling.kind == "longrope":
        return freq / jnp.asarray(
            scaling.long_factor if scaling.is_long(longest) else scaling.short_factor, jnp.float32
        )
    if scaling.kind == "yarn":
        kept = yarn_kept(scaling, rope.theta, freq.shape[0])
        return freq * kept + freq / scaling.factor * (1 - kept)
    wavelength = 2 * math.pi / freq
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor or 1.0  # where they are equal, none is between
    )
    between = (1 - blend) * freq / scaling.factor + blend * freq
    return jnp.where(wavelength > low, freq / scaling.factor, jnp.where(wavelength < high, freq, between))


def yarn_kept(scaling: RopeScaling, theta: float, pairs: int) -> Array:
    """How much of each pair's frequency YaRN keeps (arXiv:2309.00071, section 3.2): `[pairs]`, from 1 for the fastest to 0."""
    positions = scaling.original_max_position_embeddings
    pair = lambda turns: pairs * math.log(positions / (2 * math.pi * turns)) / math.log(theta)
    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0  # as in transformers: a step instead of a division by 0
    return 1 - jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / (high - low), 0, 1)


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array, longest: int) -> tuple[Array, Array]:
    """The tables of `tables_of` for the frequencies of `rope_frequencies`."""
    magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude_of(longest)
    return tables_of(rope_frequencies(rope, head_dim, longest), positions, magnitude)


def tables_of(frequencies: Array, positions: Array, magnitude: float = 1.0) -> tuple[Array, Array]:
    """Cosines and signed sines `[B, T, 1, 2, R / 2]` in float32, for both halves of the rotated channels.

    Both are concatenations. XLA would fuse bare cosines into every layer's rotations and compute them again for each.

    Args:
      frequencies: `[R / 2]`.
      positions: `[B, T]` int32.
      magnitude: the factor of both.
    """
    angles = positions[:, :, None, None, None].astype(jnp.float32) * frequencies[None, None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if magnitude != 1:
        cos, sin = magnitude * cos, magnitude * sin
    return jnp.concatenate([cos, cos], axis=3), jnp.concatenate([-sin, sin], axis=3)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates `[B, T, N, H]` by `rope_tables`, in the half-split layout of Hugging Face weights.

    Channels beyond those of the tables are unchanged."""
    turned = 2 * cos.shape[-1]
    if not turned:
        return x
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape).astype(x.dtype)
