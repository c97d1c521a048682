"""Oracles for Jacobi decoding over a Markov chain of order 1, whose windows can be enumerated."""

import itertools
from collections.abc import Sequence

import numpy as np

from specjax.reference.rejection import residual


def expected(
    table: np.ndarray, root: int, first: Sequence[int], new: int, fill: str = "repeat", keep_last: bool = True
) -> tuple[np.ndarray, float]:
    """Oracle: speculative Jacobi decoding with independent draws, judged by rejection, over all of its chances.

    Args:
      table: `[M, V]`, the distribution after each token; rows beyond V belong to roots outside the vocabulary.
      root: the last token of the prompt.
      first: the first window, W fixed tokens; with the fill "random" it is drawn instead.
      new: how many tokens are decoded; later ones do not count.
      fill: "repeat", the last token so far; or "random", any of V alike.
      keep_last: whether the draw after a window's last token is kept.

    Returns:
      The distribution of the texts, `[V] * new`, and the expected number of passes.
    """
    vocab, width = table.shape[1], len(first)
    dist, passes = np.zeros((vocab,) * new), 0.0

    def fills(count: int, last: int):
        """Every filling of `count` slots with its chance, and the distribution that each token was drawn from."""
        if fill == "repeat":
            yield 1.0, (last,) * count, [np.eye(vocab)[last % vocab]] * count
        else:
            for tokens in itertools.product(range(vocab), repeat=count):
                yield vocab**-count, tokens, [np.full(vocab, 1 / vocab)] * count

    def step(chance: float, text: tuple[int, ...], last: int, window: tuple[int, ...], laws: list[np.ndarray]) -> None:
        nonlocal passes
        if len(text) >= new:
            dist[text[:new]] += chance
            return
        passes += chance
        p = [table[token] for token in (last, *window)]
        reached = chance
        for n in range(width + 1):
            passed = min(1.0, p[n][window[n]] / laws[n][window[n]]) if n < width else 0.0
            stops = reached * (1 - passed)
            own = residual(p[n], laws[n]) if n < width else p[n]
            drawn = p[n + 1 : width + keep_last]
            for token, tokens in itertools.product(range(vocab), itertools.product(range(vocab), repeat=len(drawn))):
                weight = stops * own[token] * np.prod([q[t] for q, t in zip(drawn, tokens, strict=True)])
                if weight > 0:
                    for part, filled, their in fills(width - len(drawn), token):
                        there = (*text, *window[:n], token)
                        step(weight * part, there, token, (*tokens, *filled), [*drawn, *their])
            reached *= passed

    if fill == "repeat":
        step(1.0, (), root, tuple(first), [np.eye(vocab)[token] for token in first])
    else:
        for part, filled, their in fills(width, root):
            step(part, (), root, filled, their)
    return dist, passes


def coupled(
    table: np.ndarray, root: int, first: Sequence[int], noise: np.ndarray, keep_last: bool = True
) -> tuple[list[int], int]:
    """Oracle: Jacobi decoding whose passes share each position's Gumbel noise; new slots repeat the last token.

    Args:
      table: see `expected`.
      root: the last token of the prompt.
      first: the first window.
      noise: `[new, V]`, of every position; later positions do not count.
      keep_last: see `expected`.

    Returns:
      The text, and the number of passes.
    """
    vocab, new = table.shape[1], len(noise)
    noise = np.concatenate([noise, np.zeros((len(first) + 1, vocab))])
    text, window, passes = [], list(first), 0
    while len(text) < new:
        passes += 1
        read = [text[-1] if text else root, *window]
        drawn = [int(np.argmax(np.log(table[token]) + noise[len(text) + i])) for i, token in enumerate(read)]
        n = next((i for i, token in enumerate(window) if token != drawn[i]), len(window))
        left = drawn[n + 1 : len(window) + keep_last]
        text += drawn[: n + 1]
        window = left + [text[-1]] * (len(window) - len(left))
    return text[:new], passes
