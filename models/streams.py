"""Several residual streams of which a layer computes one: AltUp (Baykal et al. 2023, arXiv:2301.13310), as Gemma 3n has it.

A layer predicts all streams from those that enter it, runs its mixer and its feed-forward on the first, and corrects all by
what these changed.

Shapes: `B` rows, `T` tokens, `E` width, `P` streams. Between layers, the streams lie side by side in the last axis,
`[B, T, P E]`, and begin with the one that is computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.gemma_experts import linear
from specjax.models.norms import NormConfig

Array = jax.Array
_LEAST = 1e-5
"""The least mean square by which a vector is divided."""


class Streams(nnx.Module):
    """The `count` streams of a model of width `size`: they are made of the embeddings, and joined after the last layer."""

    def __init__(self, count: int, size: int, dtype: Any, rngs: nnx.Rngs):
        others = lambda: nnx.List([linear(size, size, dtype, rngs) for _ in range(count - 1)])
        self.enter, self.leave = others(), others()
        self.count = count

    def split(self, h: Array) -> Array:
        """The streams `[B, T, P E]` of embeddings `[B, T, E]`: these, and projections of the same length."""
        return jnp.concatenate([h, *(_as_long(project(h), h) for project in self.enter)], axis=-1)

    def joined(self, h: Array) -> Array:
        """The mean `[B, T, E]` of the streams `[B, T, P E]`: the first, and projections of the others of the same length."""
        first, *others = jnp.split(h, self.count, axis=-1)
        found = [_as_long(project(x), first) for project, x in zip(self.leave, others, strict=True)]
        return sum(found, first) / self.count


def _as_long(x: Array, like: Array) -> Array:
    """Vectors `x` `[..., E]`, each with the length of the one in `like`."""
    square = lambda x: jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jnp.sqrt(square(like)) / jnp.sqrt(jnp.maximum(square(x), _LEAST))


class AltUp(nnx.Module):
    """A layer's prediction and correction of `count` streams of width `size`."""

    def __init__(self, count: int, size: int, norm: NormConfig, dtype: Any, rngs: nnx.Rngs):
        self.norm = norm.build(size, dtype)
        self.router = linear(size, count, dtype, rngs)
        self.predict = linear(count, count * count, dtype, rngs)
        self.correct = linear(count, count, dtype, rngs)
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.count = count

    def predicted(self, h: Array) -> Array:
        """The streams `[B, T, P, E]` that the layer begins with, from those that enter it, `[B, T, P E]`."""
        h = h.reshape(*h.shape[:2], self.count, -1)
        weights = self.predict(self._routed(h[:, :, 0])).reshape(*h.shape[:2], self.count, self.count, 1)
        # products and a sum instead of a matrix product, which rounds float32 on accelerators with fewer bits
        return h + (weights * h[:, :, None]).sum(axis=3)

    def corrected(self, h: Array, first: Array, further: Callable[[Array], Array] | None = None) -> Array:
        """The streams `[B, T, P E]` after the layer.

        Args:
          h: `[B, T, P, E]`, see `predicted`.
          first: `[B, T, E]`, what the layer made of the first.
          further: makes, from the corrected first one, a vector that is added to all others.
        """
        weights = 1 + self.correct(self._routed(first))
        h = h + weights[..., None] * (first - h[:, :, 0])[:, :, None]
        if further is not None:
            added = further(h[:, :, 0] * self.scale[...].astype(h.dtype)[None, None])
            h = jnp.concatenate([h[:, :, :1], h[:, :, 1:] + added[:, :, None]], axis=2)
        return h.reshape(*h.shape[:2], -1)

    def _routed(self, x: Array) -> Array:
        """`[B, T, P]`, from one stream `[B, T, E]`."""
        return jnp.tanh(self.router(self.norm(x) / x.shape[-1]))
