"""Oracles for the expanders, with host lists.

`score(path)` is a pair of `[V]` arrays, where `path` is a tuple of tokens below the root: the rank scores of the
candidates after it, and their log-worth. Candidates whose rank score is -inf do not exist.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Path = tuple[int, ...]
Score = Callable[[Path], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A node that EAGLE-2 scored: its path below the root, its cumulative worth, and its parent's index among the
    candidates.
    """

    path: Path
    total: float
    parent: int


def ranked(scores: np.ndarray, k: int) -> list[int]:
    """Oracle: the k best ids; on a tie the lower one comes first."""
    return np.argsort(-np.asarray(scores), kind="stable")[:k].tolist()


def eagle2_candidates(score: Score, k: int, depth: int) -> list[Candidate]:
    """Oracle: all candidates of EAGLE-2's growth, level by level."""
    candidates: list[Candidate] = []
    beam: list[tuple[Path, float, int]] = [((), 0.0, -1)]
    for _ in range(depth):
        level = []
        for path, total, ident in beam:
            scores, worth = score(path)
            for token in ranked(scores, k):
                step = worth[token] if scores[token] > -np.inf else -np.inf
                level.append(Candidate((*path, token), total + step, ident))
        first = len(candidates)
        candidates += level
        chosen = ranked(np.asarray([c.total for c in level]), k)
        beam = [(level[i].path, level[i].total, first + i) for i in chosen]
    return candidates


def eagle2(score: Score, k: int, depth: int, nodes: int) -> tuple[list[Path], list[int], list[float]]:
    """Oracle: the kept tree as paths, parents and cumulative worths of its nodes, the root first."""
    candidates = eagle2_candidates(score, k, depth)
    keep = sorted(ranked(np.asarray([c.total for c in candidates]), nodes - 1))
    place = {-1: 0} | {ident: 1 + i for i, ident in enumerate(keep)}
    paths = [()] + [candidates[i].path for i in keep]
    parents = [-1] + [place.get(candidates[i].parent, 0) for i in keep]
    return paths, parents, [0.0] + [candidates[i].total for i in keep]


def static(score: Score, choices: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], Path | None]:
    """Oracle: the token path of every rank path; None if a candidate on it does not exist."""
    out: dict[tuple[int, ...], Path | None] = {(): ()}
    for choice in sorted(choices, key=len):
        above = out[choice[:-1]]
        if above is None:
            out[choice] = None
            continue
        scores, _ = score(above)
        token = ranked(scores, choice[-1] + 1)[-1]
        out[choice] = (*above, token) if scores[token] > -np.inf else None
    return out
