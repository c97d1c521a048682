"""Oracles for retrieval: a search of the whole store, counted prefixes, and trees as sets of strings."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from specjax.reference import trees

String = tuple[int, ...]


def longest_match(documents: Sequence[Sequence[int]], text: Sequence[int], span: int, min_span: int) -> list[String]:
    """Oracle: what follows every occurrence of the longest suffix of `text` (`min_span` to `span` tokens) in a document.

    Occurrences at a document's end, which nothing follows, do not count. The returned length is the longest suffix's.
    """
    for size in range(min(span, len(text)), min_span - 1, -1):
        suffix = list(text[len(text) - size :])
        found = [
            tuple(document[end:])
            for document in map(list, documents)
            for end in range(size, len(document))
            if document[end - size : end] == suffix
        ]
        if found:
            return found
    return []


def prefix_counts(sequences: Iterable[Sequence[int]], length: int) -> Counter[String]:
    """Oracle: how many of the sequences begin with each string of up to `length` tokens."""
    return Counter(tuple(s[:size]) for s in sequences for size in range(1, 1 + min(length, len(s))))


def strings(tokens: Sequence[int], parent: Sequence[int], valid: Sequence[bool]) -> list[String]:
    """Oracle: the tokens of every valid node except the root, from the root's children down to it, in the order of the
    nodes.
    """
    paths = [[tokens[n] for n in trees.path_to(parent, node)[1:]] for node in range(len(tokens))]
    return [tuple(map(int, path)) for path, real in zip(paths[1:], valid[1:], strict=True) if real]


def union(a: Sequence[String], b: Sequence[String], nodes: int) -> list[String]:
    """Oracle: the strings of two trees merged into one of at most `nodes` nodes, root included; the first tree's come
    first.
    """
    return list(dict.fromkeys([*a, *b]))[: nodes - 1]


def pruned(retrieved: Sequence[String], drafted: Sequence[String], first: int) -> list[String]:
    """Oracle: retrieved strings whose first token is among the draft's first `first` tokens after the root, if there
    are any.
    """
    best = [string[0] for string in drafted if len(string) == 1][:first]
    return [string for string in retrieved if not best or string[0] in best]


def sorted_positions(tokens: Sequence[int], separator: int, span: int) -> np.ndarray:
    """Oracle: positions with a token before and at them, sorted by the `span` tokens before, nearest first, then by place."""
    inner = [i for i in range(1, len(tokens)) if tokens[i] != separator != tokens[i - 1]]
    clipped = lambda i: [tokens[max(j, 0)] for j in range(i - 1, i - 1 - span, -1)]
    return np.asarray(sorted(inner, key=lambda i: (clipped(i), i)))
