"""Oracles for the sampling filters, one row `[V]` at a time, in float64 and `transformers`' order.

Ties at a cut are all kept.
"""

from collections.abc import Iterable, Sequence

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
    """Oracle: positive logits of seen tokens are divided, negative ones multiplied; once per token."""
    out = np.array(logits, np.float64)
    for token in set(seen):
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    return out


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Oracle: keeps scores that are at least the k-th largest; 0 is off."""
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
    """Oracle: keeps the smallest set of the likeliest tokens with mass at least p; 1 is off."""
    if p >= 1:
        return scores
    kept = (mass_above(scores) < p) & (scores > -np.inf)
    return np.where(scores >= scores[kept].min(), scores, -np.inf)


def min_p(scores: np.ndarray, share: float) -> np.ndarray:
    """Oracle: keeps tokens with at least this share of the likeliest token's probability; 0 is off."""
    probabilities = softmax(scores)
    return np.where(probabilities >= share * probabilities.max(), scores, -np.inf)


def entropy(scores: np.ndarray) -> float:
    """Oracle: the entropy of the scores' distribution, in nats."""
    chances = softmax(scores)
    return -sum(p * np.log(p) for p in chances if p > 0)


def typical_p(scores: np.ndarray, mass: float) -> np.ndarray:
    """Oracle: keeps the tokens whose surprisal is nearest to the entropy until they have the mass; 1 is off."""
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(softmax(scores)) - entropy(scores))
    reached, farthest = 0.0, np.inf
    for token in np.argsort(distance, kind="stable"):
        farthest, reached = distance[token], reached + softmax(scores)[token]
        if reached >= mass:
            break
    return np.where(distance <= farthest, scores, -np.inf)


def epsilon_cutoff(scores: np.ndarray, epsilon: float) -> np.ndarray:
    """Oracle: keeps tokens with at least this probability, and the likeliest."""
    chances = softmax(scores)
    return np.where((chances >= epsilon) | (chances == chances.max()), scores, -np.inf)


def eta_cutoff(scores: np.ndarray, eta: float) -> np.ndarray:
    """Oracle: the same with min(eta, sqrt(eta) exp(-entropy))."""
    return epsilon_cutoff(scores, min(eta, np.sqrt(eta) * np.exp(-entropy(scores))))


def top_h(scores: np.ndarray, share: float, width: int = 100) -> np.ndarray:
    """Oracle: of the likeliest `width`, keeps those whose -p log p, in order, add up to at most this share of their
    entropy.
    """
    order = np.argsort(-scores, kind="stable")[:width]
    bound, total, out = share * entropy(scores[order]), 0.0, np.full(len(scores), -np.inf)
    for rank, (token, p) in enumerate(zip(order, softmax(scores[order]), strict=True)):
        total -= p * np.log(p) if p > 0 else 0.0
        if rank and total > bound:
            break
        out[token] = scores[token]
    return out


def dry(
    logits: np.ndarray,
    text: Sequence[int],
    multiplier: float,
    base: float = 1.75,
    allowed_length: int = 2,
    sequence_breakers: Sequence[int] = (),
) -> np.ndarray:
    """Oracle: for every token, the longest suffix of the text that stands before it somewhere, up to 50 tokens.

    The penalty grows with its length.
    """
    text, out = list(text), np.array(logits, np.float64)
    for token in set(text) - set(sequence_breakers):
        longest = 0
        for place in (i for i in range(len(text)) if text[i] == token):
            for n in range(1, min(place, 50) + 1):
                end = text[len(text) - n :]
                if text[place - n : place] == end and not set(end) & set(sequence_breakers):
                    longest = max(longest, n)
        if longest >= allowed_length:
            out[token] -= multiplier * base ** (longest - allowed_length)
    return out


def xtc(scores: np.ndarray, threshold: float, special: Sequence[int] = ()) -> np.ndarray:
    """Oracle: removes the tokens of at least this probability, except the least likely of them (on a tie the last).

    It removes nothing if a special token is among them.
    """
    order, chances = np.argsort(-scores, kind="stable"), softmax(scores)
    removed = [token for token, after in zip(order, order[1:], strict=False) if chances[after] >= threshold]
    out = scores.copy()
    if not set(removed) & set(special):
        out[removed] = -np.inf
    return out


def warp(logits: np.ndarray, temperature: float, k: int = 0, p: float = 1.0, share: float = 0.0) -> np.ndarray:
    """Oracle: the scores whose softmax is the distribution of the next token; temperature 0 changes nothing."""
    scores = np.asarray(logits, np.float64)
    if temperature == 0:
        return scores
    return min_p(top_p(top_k(scores / temperature, k), p), share)
