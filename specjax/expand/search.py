"""Static trees from measured acceptance: take the likeliest candidates first (Medusa, arXiv:2401.10774, section 2.3.3)."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.tree import Topology

Path = tuple[int, ...]


def search_tree(accuracy: Any, nodes: int) -> tuple[Path, ...]:
    """The tree with the most expected accepted tokens, if levels are accepted independently.

    Starting at the best candidate, it keeps adding the likeliest path among the next siblings and first children of its
    nodes. The result is the best tree of its size if a better rank is always accepted at least as often as a worse one.

    Args:
      accuracy: `[D, R]`, how often the candidate of a rank is the target's token at depths 1..D.
      nodes: of the tree, including the root.

    Returns:
      Rank paths for `Topology.from_choices` or the `Static` expander, short ones first.

    Raises:
      ValueError: if the accuracies are not `[D, R]` shares, or so many nodes do not fit in D levels of R candidates.
    """
    accuracy = room_for(nodes, shares(accuracy), "search_tree")
    depth, ranks = accuracy.shape
    frontier: list[tuple[float, Path]] = [(-float(accuracy[0, 0]), (0,))]
    chosen: list[Path] = []
    while len(chosen) < nodes - 1:
        _, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < depth:
            child = (*path, 0)
            heapq.heappush(frontier, (-chance(accuracy, child), child))
        if path[-1] + 1 < ranks:
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(frontier, (-chance(accuracy, sibling), sibling))
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def most_accepted(topology: Topology, accepted: Sequence[float], nodes: int) -> Topology:
    """The part of a tree that was accepted most often (STAND, arXiv:2506.04708, section 4.3).

    It keeps adding the node with the highest count among the next siblings and first children of its nodes.

    Args:
      topology: a tree whose nodes' children are their best candidates.
      accepted: by node, how often it was accepted; the root's is not read.
      nodes: of the part, including the root.

    Raises:
      ValueError: if the tree leaves out candidates, or does not have so many nodes.
    """
    if not topology.leaves_out_none:
        raise ValueError("the tree must have the best candidates of every node, with none left out")
    if not 2 <= nodes <= len(topology.parents):
        raise ValueError(f"the tree has {len(topology.parents)} nodes, of which 2 to all can be kept, not {nodes}")
    index = {path: node for node, path in enumerate(topology.paths)}
    chosen: list[Path] = []
    frontier: list[tuple[float, int, Path]] = [(-accepted[index[(0,)]], index[(0,)], (0,))]
    while len(chosen) < nodes - 1:
        *_, path = heapq.heappop(frontier)
        chosen.append(path)
        for near in ((*path, 0), (*path[:-1], path[-1] + 1)):
            if near in index:
                heapq.heappush(frontier, (-accepted[index[near]], index[near], near))
    return Topology.from_choices(tuple(chosen))


def chance(accuracy: np.ndarray, path: Sequence[int]) -> float:
    """The chance that every token of a rank path is accepted; 1 for the root's empty path."""
    return float(np.prod([accuracy[level, rank] for level, rank in enumerate(path)]))


def room_for(nodes: int, accuracy: np.ndarray, name: str) -> np.ndarray:
    """`accuracy` `[D, R]`, unchanged.

    Raises:
      ValueError: if trees of D levels and R candidates do not have so many nodes; it names the caller.
    """
    depth, ranks = accuracy.shape
    most = sum(ranks**level for level in range(depth + 1))
    if not 2 <= nodes <= most:
        raise ValueError(f"{name}: {depth} levels of {ranks} candidates make 2 to {most} nodes, not {nodes}")
    return accuracy


def shares(accuracy: Any) -> np.ndarray:
    """`accuracy` as a float array.

    Raises:
      ValueError: if it is not `[D, R]` of numbers in [0, 1] whose rows add up to at most 1.
    """
    array = np.asarray(accuracy, float)
    if array.ndim != 2 or array.size == 0 or not (array >= 0).all() or not (array.sum(axis=1) <= 1 + 1e-6).all():
        raise ValueError("accuracy must be [depth, rank] shares: each at least 0, a depth's at most 1 in sum")
    return array
