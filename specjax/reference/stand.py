"""Oracle for the n-gram memory of STAND: a dictionary from contexts to average distributions."""

from collections.abc import Sequence

import numpy as np

Distribution = dict[int, float]
Memory = dict[tuple[int, ...], tuple[int, Distribution]]

LONGEST = 3


def contexts(text: Sequence[int]) -> list[tuple[int, ...]]:
    """Oracle: the last 3, 2 and 1 tokens of a text, as far as it has them."""
    return [tuple(text[-size:]) for size in range(min(LONGEST, len(text)), 0, -1)]


def distribution_of(logits: Sequence[float], k: int) -> Distribution:
    """Oracle: the k largest logits as probabilities among themselves."""
    scores = np.asarray(logits, np.float64)
    best = np.argsort(-scores, kind="stable")[:k]
    weights = np.exp(scores[best] - scores[best].max())
    return {int(i): float(w / weights.sum()) for i, w in zip(best, weights, strict=True)}


def average(old: Distribution, count: int, new: Distribution, k: int) -> Distribution:
    """Oracle: `old`, an average of `count` distributions, after one more; the k likeliest tokens of both stay."""
    share = 1 / (count + 1)
    merged = {i: old.get(i, 0.0) * (1 - share) + new.get(i, 0.0) * share for i in (*old, *new)}
    return dict(sorted(merged.items(), key=lambda entry: -entry[1])[:k])


def learn(memory: Memory, updates: Sequence[tuple[tuple[int, ...], Distribution]], k: int) -> Memory:
    """Oracle: the memory after one step. Among equal contexts the last one counts, averaged into the earlier entry."""
    after = dict(memory)
    for context, dist in updates:
        count, old = memory.get(context, (0, {}))
        after[context] = count + 1, average(old, count, dist, k)
    return after


def recall(memory: Memory, text: Sequence[int]) -> Distribution:
    """Oracle: the distribution after the longest known context; empty if none is known."""
    return next((memory[context][1] for context in contexts(text) if context in memory), {})


def tree(
    memory: Memory,
    text: Sequence[int],
    parents: Sequence[int],
    ranks: Sequence[int],
    noise: np.ndarray,
    temperature: float,
) -> list[int]:
    """Oracle: the tokens of a static tree, -1 where nothing is known.

    Args:
      memory: the distributions.
      text: committed tokens, the root last.
      parents: of the nodes, the root's first (-1).
      ranks: which of its parent's candidates a node is.
      noise: Gumbel vectors `[D, V]`, one per depth; not used at temperature 0.
      temperature: of the row.
    """
    lines: list[list[int]] = [list(text)]
    tokens = [int(text[-1])]
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        line, depth = lines[parent], len(lines[parent]) - len(text)
        dist = {} if line[-1] < 0 else recall(memory, line)
        score = lambda i, dist=dist, depth=depth: (
            np.log(dist[i]) / temperature + noise[depth][i] if temperature else dist[i]
        )
        best = sorted((i for i in dist if dist[i] > 0), key=lambda i: -score(i))
        tokens.append(best[rank] if rank < len(best) else -1)
        lines.append([*line, tokens[-1]])
    return tokens
