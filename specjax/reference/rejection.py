"""Oracles for rejection sampling on chains, and the exact distributions that it must keep.

A chain's distributions are given as context tables: `tables[i]` has shape `(V,) * i + (V,)`, the distribution of token
i given those before it.
"""

import itertools
from collections.abc import Sequence

import numpy as np


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Oracle: `norm(max(p - q, 0))`; p itself if nothing is left."""
    left = np.maximum(p - q, 0.0)
    return left / left.sum() if left.sum() > 0 else p


def chain(p: np.ndarray, q: np.ndarray, tokens: Sequence[int], uniforms: Sequence[float]) -> tuple[int, np.ndarray]:
    """Oracle: one row of rejection sampling, token by token.

    Args:
      p: `[K + 1, V]`, the target's distributions along the chain.
      q: `[K, V]`, the distributions the tokens were drawn from.
      tokens: K drafted tokens.
      uniforms: K numbers in [0, 1).

    Returns:
      How many tokens are accepted, and the distribution `[V]` of the token after them.
    """
    for i, token in enumerate(tokens):
        if not uniforms[i] * q[i, token] < p[i, token]:
            return i, residual(p[i], q[i])
    return len(tokens), p[len(tokens)]


def joint(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Oracle: the joint distribution `(V,) * n` of the first n tokens, the product of n tables."""
    dist = np.ones(())
    for table in tables:
        dist = dist[..., None] * table
    return dist


def expected_accepted(p: Sequence[np.ndarray], q: Sequence[np.ndarray]) -> float:
    """Oracle: the mean number of accepted tokens among K = len(q) drawn from q; the sum over i of P(the first i all pass)."""
    vocab = q[0].shape[-1]
    total = 0.0
    for length in range(1, len(q) + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            both = 1.0
            for i in range(length):
                both *= min(p[i][tokens[: i + 1]], q[i][tokens[: i + 1]])
            total += both
    return total
