"""Sequoia's trees (Chen et al. 2024, arXiv:2402.12374): made from measured acceptance by dynamic programming, before
decoding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.expand.search import Path, chance, room_for, shares


def sequoia_tree(accuracy: Any, nodes: int) -> tuple[Path, ...]:
    """The tree with the most expected accepted tokens, whatever the accuracies: no other tree of its size has more.

    A node has its first child before its second. `search_tree` builds its tree step by step, which is as good if better
    ranks are accepted at least as often. A second draw may, however, be accepted more often than a first one.

    Args:
      accuracy: `[D, R]`, how often the child of a rank is the accepted one, at depths 1..D, given that its parent was
        accepted.
      nodes: of the tree, including the root.

    Returns:
      Rank paths for `Topology.from_choices` or the `Static` expander, short ones first.

    Raises:
      ValueError: if the accuracies are not `[D, R]` shares, or so many nodes do not fit in D levels of R candidates.
    """
    accuracy = room_for(nodes, shares(accuracy), "sequoia_tree")
    below, first = _tables(accuracy, nodes - 1)
    assert below[0, 0, nodes - 1] > -np.inf
    chosen: list[Path] = []
    open_: list[tuple[Path, int, int]] = [((), 0, nodes - 1)]  # below a path, from a rank on, this many nodes
    while open_:
        path, rank, count = open_.pop()
        if count:
            own = int(first[len(path), rank, count])
            child = (*path, rank)
            chosen.append(child)
            open_ += [(child, 0, own - 1), (path, rank + 1, count - own)]
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def fastest_tree(accuracy: Any, draft: float, verify: Sequence[float]) -> tuple[Path, ...]:
    """The tree with the most tokens per second, among the best ones of every size and depth.

    Args:
      accuracy: see `sequoia_tree`.
      draft: seconds that the drafter takes for one level.
      verify: seconds of the target's pass over 1, 2, ... nodes; its length is the size of the largest tree.

    Raises:
      ValueError: if the accuracies are not `[D, R]` shares, a time is not positive, or no time is for a tree.
    """
    accuracy = shares(accuracy)
    if len(verify) < 2 or min(draft, *verify) <= 0:
        raise ValueError("fastest_tree needs times above 0, and those of passes over 1, 2, ... nodes")
    best: tuple[float, tuple[Path, ...]] = (0.0, ())
    for depth in range(1, len(accuracy) + 1):
        below, _ = _tables(accuracy[:depth], len(verify) - 1)
        speeds = (1 + below[0, 0, 1:]) / (depth * draft + np.asarray(verify[1:]))  # by the number of drafted nodes
        count = 1 + int(np.argmax(speeds))
        if speeds[count - 1] > best[0]:
            best = float(speeds[count - 1]), sequoia_tree(accuracy[:depth], 1 + count)
    return best[1]


def expected(accuracy: Any, choices: Sequence[Path]) -> float:
    """The mean number of accepted tokens of a tree, the sum of its nodes' chances."""
    return sum(chance(shares(accuracy), path) for path in choices)


def _tables(accuracy: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The value of n nodes below a node of depth d, with its children of rank r and after, `[D + 1, R + 1, most + 1]`.

    It is -inf where they do not fit. Also, how many of these nodes the child of rank r has, itself included.
    """
    depth, ranks = accuracy.shape
    worth = np.full((depth + 1, ranks + 1, most + 1), -np.inf)
    worth[:, :, 0] = 0
    first = np.zeros(worth.shape, int)
    for level in reversed(range(depth)):
        for rank in reversed(range(ranks)):
            inside = worth[level + 1, 0, :most]  # of 1, 2, ... nodes, the child itself among them
            fits = inside > -np.inf
            child = np.where(fits, accuracy[level, rank] * (1 + np.where(fits, inside, 0)), -np.inf)
            for count in range(1, most + 1):
                shared = child[:count] + worth[level, rank + 1, count - 1 :: -1]
                first[level, rank, count] = 1 + np.argmax(shared)
                worth[level, rank, count] = shared.max()
    return worth, first
