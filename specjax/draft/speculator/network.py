"""The recurrent step of speculators (arXiv:2404.19124, section 3), as functions of its parameters.

Shapes: `B` rows, `T` slots, `V` tokens, `E` the width that a step reads, `D` the width of a state.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.few_bits import embedded

Array = jax.Array

EPS = 1e-6
"""Of all norms, as published."""


def token_weight(heads: int, inner: int) -> float:
    """The factor of a token's embedding, where the state before has the factor 1.

    States have the weight `w = 2 ** (-1 / (2 heads))` in each step, so that after `heads` steps half of the variance is the
    feature's. Tokens have `sqrt(1 - w^2)`, times `sqrt(inner / 2)` for the scale of fresh embeddings.
    """
    state = 0.5 ** (0.5 / heads)
    return ((1 - state**2) * inner / 2) ** 0.5 / state


def scaled(x: Array) -> Array:
    """Features `[..., E]` with a root mean square of `sqrt(1/2)`."""
    from specjax.models.norms import rms_norm  # flax is slow to import

    return rms_norm(x, None, EPS) / 2**0.5


def shifted_norm(norm: Any, x: Array) -> Array:
    """`[..., D]` divided by its root mean square, times `scale`, plus `bias`; the mean is not subtracted."""
    from specjax.models.norms import rms_norm

    bias = jnp.reshape(norm["bias"], (1,) * (x.ndim - 1) + norm["bias"].shape)
    return rms_norm(x, norm["scale"], EPS, "wide") + bias


def gelu(x: Array) -> Array:
    """The exact one, as published."""
    return jax.nn.gelu(x, approximate=False)


def mlp_state(proj: Any, embed: Any, norm: Any, x: Array, tokens: Array, weight: float) -> Array:
    """The state `[B, T, D]` after `tokens` `[B, T]`, from a state or feature `x` `[B, T, E]`."""
    z = rows(embed, tokens, proj)
    return gelu(shifted_norm(norm, product(x, proj) + weight * z))


def lstm_state(
    proj: Any, embed: Any, cell_norm: Any, state_norm: Any, x: Array, cell: Array | None, tokens: Array, weight: float
) -> Array:
    """The state and the cell `[B, T, 2 D]` after `tokens` `[B, T]`.

    Args:
      proj: `kernel` `[E, 4 D]`.
      embed: `embedding` `[V, D]`, for all four parts, or `[V, 4 D]`.
      cell_norm: of the candidate.
      state_norm: of the cell.
      x: `[B, T, E]`, the state before, or the feature.
      cell: `[B, T, D]`, the cell before; None for an empty one.
      tokens: the tokens.
      weight: of their embeddings.
    """
    sums, z = product(x, proj), rows(embed, tokens, proj)
    z = z if z.shape[-1] == sums.shape[-1] else jnp.tile(z, (1, 1, 4))
    forget, enter, leave, candidate = jnp.split(sums + weight * z, 4, axis=-1)
    new = gelu(shifted_norm(cell_norm, candidate)) * jax.nn.sigmoid(enter)
    new = new if cell is None else new + cell * jax.nn.sigmoid(forget)
    state = gelu(shifted_norm(state_norm, new)) * jax.nn.sigmoid(leave)
    return jnp.concatenate([state, new], axis=-1)


def product(x: Array, proj: Any) -> Array:
    """`x` `[B, T, E]` projected, in the type of the kernel."""
    return x.astype(proj["kernel"].dtype) @ proj["kernel"]


def rows(embed: Any, tokens: Array, proj: Any) -> Array:
    """The embeddings `[B, T, ...]` of tokens, in the type of the projection that they are added to."""
    table = embed["embedding"]
    return embedded(table, tokens, table.shape[0]).astype(proj["kernel"].dtype)
