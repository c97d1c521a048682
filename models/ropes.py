"""Rotary embeddings (Su et al. 2021, arXiv:2104.09864): frequencies, tables of angles, and rotations by them."""

import math

import jax
import jax.numpy as jnp

from specjax.models.llama_config import LlamaConfig, RopeScaling

Array = jax.Array


def rope_frequencies(config: LlamaConfig) -> Array:
    """Inverse frequencies `[R / 2]` in float32, after the config's scaling, of the R channels of a head that are rotated."""
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    freq = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "proportional":
        return jnp.where(jnp.arange(freq.shape[0]) < scaling.rotated, freq, 0.0) / scaling.factor
    if scaling.kind == "yarn":
        kept = yarn_kept(scaling, config.rope_theta, freq.shape[0])
        return freq * kept + freq / scaling.factor * (1 - kept)
    wavelength = 2 * math.pi / freq
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
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
    high += 0.001 if low == high else 0  # as transformers has it: a step, not a division by 0
    return 1 - jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / (high - low), 0, 1)


def rope_tables(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """See `tables_of`, by the frequencies of `rope_frequencies`."""
    magnitude = 1.0 if config.rope_scaling is None else config.rope_scaling.magnitude
    return tables_of(rope_frequencies(config), positions, magnitude)


def tables_of(frequencies: Array, positions: Array, magnitude: float = 1.0) -> tuple[Array, Array]:
    """Cosines and signed sines `[B, T, 1, 2, R / 2]` in float32, for the first and the second half of what is rotated.

    Both are concatenations: XLA would fuse bare cosines into every layer's rotations, and compute them each time.

    Args:
      frequencies: `[R / 2]`.
      positions: `[B, T]` int32.
      magnitude: multiplies both.
    """
    angles = positions[:, :, None, None, None].astype(jnp.float32) * frequencies[None, None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if magnitude != 1:
        cos, sin = magnitude * cos, magnitude * sin
    return jnp.concatenate([cos, cos], axis=3), jnp.concatenate([-sin, sin], axis=3)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of `[B, T, N, H]` by `rope_tables`, in the half-split layout of the Hugging Face weights; channels
    behind those that the tables are for stay as they are."""
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos + jnp.flip(halves, axis=-2) * sin).reshape(x.shape).astype(x.dtype)
