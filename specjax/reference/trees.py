"""Oracles for trees: ancestors, paths, and the walks that decide what is accepted. One row at a time."""

from collections.abc import Sequence

import numpy as np

Ints = Sequence[int] | np.ndarray


def path_to(parent: Ints, node: int) -> list[int]:
    """Oracle: the nodes from the root to `node`."""
    path = [int(node)]
    while parent[path[0]] >= 0:
        path.insert(0, int(parent[path[0]]))
    return path


def ancestors(parent: Ints) -> np.ndarray:
    """Oracle: `[N, N]` bool, whether column j is on row i's path."""
    out = np.zeros((len(parent), len(parent)), bool)
    for node in range(len(parent)):
        out[node, path_to(parent, node)] = True
    return out


def path_tokens(tokens: Ints, parent: Ints, max_depth: int) -> np.ndarray:
    """Oracle: `[N, D]`, the tokens below the root on each node's path, -1 padded."""
    out = np.full((len(parent), max_depth), -1)
    for node in range(len(parent)):
        below = path_to(parent, node)[1:]
        out[node, : len(below)] = [tokens[n] for n in below]
    return out


def walk(tokens: Ints, parent: Ints, valid: Ints, draw: Ints) -> tuple[list[int], int, int]:
    """Oracle: follows the target's draws down from the root.

    Args:
      tokens: N draft tokens.
      parent: N parents.
      valid: N flags.
      draw: the target's token after each node.

    Returns:
      The accepted path with the root, how many draft tokens it holds, and the target's token after it. Among equally
      deep paths (duplicate siblings) the one with the lowest last node wins.
    """
    reached = [0]
    for node in range(1, len(parent)):
        above = int(parent[node])
        if valid[node] and above in reached and tokens[node] == draw[above]:
            reached.append(node)
    deepest = max(reached, key=lambda node: (len(path_to(parent, node)), -node))
    path = path_to(parent, deepest)
    return path, len(path) - 1, int(draw[deepest])


def greedy_walk(tokens: Ints, parent: Ints, valid: Ints, logits: np.ndarray) -> tuple[list[int], int, int]:
    """Oracle: `walk` along the argmax of logits `[N, V]`."""
    return walk(tokens, parent, valid, [int(np.argmax(row)) for row in logits])


def coupled_walk(
    tokens: Ints, parent: Ints, valid: Ints, scores: np.ndarray, gumbel: np.ndarray
) -> tuple[list[int], int, int]:
    """Oracle: `walk` along argmax(scores + g) with scores `[N, V]` and one noise vector per depth, `[D + 1, V]`."""
    depths = [len(path_to(parent, node)) - 1 for node in range(len(parent))]
    return greedy_walk(tokens, parent, valid, np.asarray(scores) + np.asarray(gumbel)[depths])
