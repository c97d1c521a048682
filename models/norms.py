"""Norms of the last axis: RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) and layer norms, which subtract the mean
(Ba et al. 2016, arXiv:1607.06450). They differ in when they round and what they scale by."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array
NormKind = Literal["rounded", "wide", "offset", "bare"]
"""How a norm scales. `rounded`: in the parameter's type, after rounding (Llama). `wide`: in float32, before rounding
(Gemma 4). `offset`: like `wide`, but by 1 more than the parameter (Gemma 2 and 3). `bare`: an RMS norm without a parameter
(Llama 4)."""


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """A norm.

    Attributes:
      eps: added to the mean square.
      kind: see `NormKind`.
      mean: whether the mean is subtracted first: a layer norm. Its `kind` is `wide` or `offset`.
      bias: whether a layer norm has a bias.
    """

    eps: float = 1e-6
    kind: NormKind = "rounded"
    mean: bool = False
    bias: bool = False

    def build(self, width: int, dtype: Any, heads: int | None = None) -> "RMSNorm | LayerNorm":
        """The module, over a last axis of `width`; with `heads`, the axis before has that many, each with its own
        parameters."""
        lead = () if heads is None else (heads,)
        if self.mean:
            return LayerNorm(self, (*lead, width), dtype)
        return RMSNorm((*lead, width), self.eps, dtype, self.kind)


def rms_norm(x: Array, scale: Array | None, eps: float, kind: NormKind = "rounded") -> Array:
    """Normalises the last axis in float32 and scales it.

    Args:
      x: any shape.
      scale: of the last axis or axes, or None for 1.
      eps: added to the mean square.
      kind: see `NormKind`.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if scale is None:
        return x32.astype(x.dtype)
    scale = _over(x, scale)
    if kind == "rounded":
        return x32.astype(x.dtype) * scale
    scale = scale.astype(jnp.float32)
    return (x32 * (scale if kind == "wide" else 1 + scale)).astype(x.dtype)


def _over(x: Array, parameter: Array) -> Array:
    """A parameter of the last axes of `x` with as many axes as `x`."""
    return jnp.reshape(parameter, (1,) * (x.ndim - parameter.ndim) + parameter.shape)


class RMSNorm(nnx.Module):
    """See `rms_norm`."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, dtype: Any, kind: NormKind = "rounded"):
        if kind != "bare":
            self.scale = nnx.Param((jnp.zeros if kind == "offset" else jnp.ones)(shape, dtype))
        self.eps, self.kind = eps, kind

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, None if self.kind == "bare" else self.scale[...], self.eps, self.kind)


class LayerNorm(nnx.Module):
    """See `NormConfig.mean`."""

    def __init__(self, config: NormConfig, shape: tuple[int, ...], dtype: Any):
        self.scale = nnx.Param((jnp.zeros if config.kind == "offset" else jnp.ones)(shape, dtype))
        if config.bias:
            self.bias = nnx.Param(jnp.zeros(shape, dtype))
        self.config = config

    def __call__(self, x: Array) -> Array:
        c, x32 = self.config, x.astype(jnp.float32)
        x32 = rms_norm(x32 - jnp.mean(x32, axis=-1, keepdims=True), self.scale[...], c.eps, c.kind)
        if c.bias:
            x32 = x32 + _over(x, self.bias[...].astype(jnp.float32))
        return x32.astype(x.dtype)
