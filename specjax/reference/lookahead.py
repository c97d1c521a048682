"""Oracles for lookahead decoding."""

from collections.abc import Iterable, Sequence

Gram = tuple[int, ...]


def pool_insert(pool: dict[int, list[Gram]], grams: Iterable[Sequence[int]], buckets: int, keep: int) -> None:
    """Oracle: puts n-grams in one by one, in place; a bucket keeps the latest `keep` different ones, the latest first."""
    for gram in grams:
        gram = tuple(int(token) for token in gram)
        if min(gram) < 0:
            continue
        entries = pool.setdefault(gram[0] % buckets, [])
        if gram in entries:
            entries.remove(gram)
        entries.insert(0, gram)
        del entries[keep:]


def merged_paths(tails: Iterable[Sequence[int]], nodes: int) -> list[Gram]:
    """Oracle: every different beginning of the tails, tail by tail, as many as a tree of `nodes` nodes has room for."""
    paths: list[Gram] = []
    for tail in tails:
        for end in range(1, len(tail) + 1):
            path = tuple(int(token) for token in tail[:end])
            if path not in paths:
                paths.append(path)
    return paths[: nodes - 1]


def window_sees(level: int, columns: int) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Oracle: for every (level, column) of the window except the root's (0, 0), which others it sees; all see the root."""
    slots = [(r, c) for r in range(level - 1) for c in range(columns) if (r, c) != (0, 0)]
    sees = {}
    for r, c in slots:
        sees[r, c] = {(s, d) for s, d in slots if (s == 0 and d <= c) or (0 < s <= r and d == c)}
    return sees
