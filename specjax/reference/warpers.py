"""Oracles for the sampling filters, one row `[V]` at a time, in float64 and `transformers`' order.

Ties at a cut are all kept.
"""

from collections.abc import Iterable

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """Oracle: probabilities over the last axis; -inf gives 0."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Oracle: log-probabilities over the last axis."""
    top = scores.max(axis=-1, keepdims=True)
    return scores - top - np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))


def repetition_penalty(logits: np.ndarray, seen: Iterable[int], penalty: float) -> np.ndarray:
    """Oracle: positive logits of seen tokens are divided, negative ones multiplied; once a token."""
    out = np.array(logits, np.float64)
    for token in set(seen):
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    return out


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Oracle: keeps what is at least the k-th largest; 0 is off."""
    if k == 0 or k >= len(scores):
        return scores
    return np.where(scores >= np.sort(scores)[-k], scores, -np.inf)


def mass_above(scores: np.ndarray) -> np.ndarray:
    """Oracle: for every token, the probability of all likelier ones (among equals, of those with a lower id)."""
    order = np.argsort(-scores, kind="stable")
    mass = softmax(scores)[order]
    out = np.empty(len(scores))
    out[order] = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    return out


def top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """Oracle: keeps the smallest likeliest set of mass at least p; 1 is off."""
    if p >= 1:
        return scores
    kept = (mass_above(scores) < p) & (scores > -np.inf)
    return np.where(scores >= scores[kept].min(), scores, -np.inf)


def min_p(scores: np.ndarray, share: float) -> np.ndarray:
    """Oracle: keeps what has at least this share of the likeliest token's probability; 0 is off."""
    probabilities = softmax(scores)
    return np.where(probabilities >= share * probabilities.max(), scores, -np.inf)


def warp(logits: np.ndarray, temperature: float, k: int = 0, p: float = 1.0, share: float = 0.0) -> np.ndarray:
    """Oracle: the scores whose softmax is the law of the next token; temperature 0 changes nothing."""
    scores = np.asarray(logits, np.float64)
    if temperature == 0:
        return scores
    return min_p(top_p(top_k(scores / temperature, k), p), share)
