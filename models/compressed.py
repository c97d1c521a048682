"""Compressed experts: learned vectors in place of some of a token's experts (He et al. 2025, arXiv:2503.00634).

A token's main experts are computed, its auxiliary ones are not. Each expert has three vectors of the model's width, for the
products of a gated MLP. The mean c of the auxiliary experts' vectors, by their weights, changes what all main experts of that
token compute: `down(silu(gate(x * c[0])) * up(x * c[2]) * c[1])`, where `c[1]` is cut to an expert's inner width.

Shapes: `M` tokens of all rows, `E` width, `X` experts, `F` an expert's inner width, `n` auxiliary experts per token.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.precision import full_einsum

Array = jax.Array


def combined(vectors: Array, weights: Array, experts: Array) -> Array:
    """c of every token, `[M, 3, E]` in float32; see this module.

    Args:
      vectors: `[X, 3, E]`, the published `ces`.
      weights: `[M, n]` float32, of a token's auxiliary experts. If all are 0, the experts count alike.
      experts: `[M, n]` int32.
    """
    total = weights.sum(axis=-1, keepdims=True)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 1 / weights.shape[1])
    count, _, width = vectors.shape
    of_each = jnp.sum(jnp.where(experts[..., None] == jnp.arange(count)[None, None], shares[..., None], 0), axis=1)
    return full_einsum("mx,xv->mv", of_each, vectors.astype(jnp.float32).reshape(count, -1)).reshape(-1, 3, width)


def changed(x: Array, vectors: Array, weights: Array, experts: Array, inner: int) -> Array:
    """What the main experts of tokens `[M, E]` read, `[M, 2 E + F]`: inputs of gates, inputs of ups, and the factor between.

    Args:
      x: the tokens.
      vectors: see `combined`.
      weights: see `combined`.
      experts: see `combined`.
      inner: F, at most E.
    """
    c = combined(vectors, weights, experts)
    wide = x.astype(jnp.float32)
    return jnp.concatenate([wide * c[:, 0], wide * c[:, 2], c[:, 1, :inner]], axis=-1).astype(x.dtype)
