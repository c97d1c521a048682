"""Repetition penalty (Keskar et al. 2019, CTRL, section 4.1), over the text and over a node's own path."""

import jax
import jax.numpy as jnp

Array = jax.Array


def seen_tokens(tokens: Array, length: Array, paths: Array | None, vocab: int) -> Array:
    """Which ids occur before each position, `[B, T, V]` bool (`T` is 1 without `paths`).

    Args:
      tokens: `[B, L]`, the text.
      length: `[B]`, how much of it is real.
      paths: `[B, T, D]` more ids seen by each of T positions, -1 for none.
      vocab: V.
    """
    rows = jnp.arange(tokens.shape[0])[:, None]
    real = jnp.arange(tokens.shape[1])[None] < length[:, None]
    seen = jnp.zeros((tokens.shape[0], vocab), bool)
    seen = seen.at[rows, jnp.where(real, tokens, vocab)].set(True, mode="drop")[:, None, :]
    if paths is None or paths.shape[-1] == 0:
        return seen
    seen = jnp.broadcast_to(seen, (tokens.shape[0], paths.shape[1], vocab))
    index = jnp.where(paths >= 0, paths, vocab)
    return seen.at[rows[:, :, None], jnp.arange(paths.shape[1])[None, :, None], index].set(True, mode="drop")


def penalise(logits: Array, seen: Array, penalty: Array) -> Array:
    """`[B, T, V]` logits after the penalty `[B]`."""
    factor = penalty[:, None, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * factor, logits / factor), logits)
