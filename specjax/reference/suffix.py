"""Oracle for SuffixDecoding: counts of strings in place of suffix trees."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence


def counts_of(sequences: Sequence[Sequence[int]], span: int) -> Counter:
    """Oracle: how often every string of at most `span` tokens occurs in some sequences."""
    found: Counter = Counter()
    for sequence in sequences:
        for begin, size in itertools.product(range(len(sequence)), range(1, span + 1)):
            if begin + size <= len(sequence):
                found[tuple(sequence[begin : begin + size])] += 1
    return found


def ways(counts: Counter, match: tuple[int, ...], span: int) -> list[tuple[int, ...]]:
    """Oracle: the counts along the most frequent continuation; of equally frequent tokens the larger counts go on."""
    children = [string for string in counts if len(string) == len(match) + 1 and string[:-1] == match]
    if not children:
        return [()]
    most = max(counts[child] for child in children)
    return [(most, *way) for child in children if counts[child] == most for way in ways(counts, child, span)]


def speculate(
    counts: Counter,
    text: Sequence[int],
    length: int,
    span: int,
    factor: float,
    offset: float,
    min_prob: float,
    tree: bool = False,
) -> tuple[float, int, list[float]]:
    """Oracle: the best draft's score, the length of its match and the chances of its tokens.

    Args:
      counts: of `counts_of`.
      text: what is continued.
      length: how many tokens are drafted, at most.
      span: see `counts_of`.
      factor: how many tokens a match drafts for each of its own.
      offset: and how many besides.
      min_prob: the smallest chance.
      tree: whether a draft has the likeliest tokens of all ways; otherwise those of one way.
    """
    context, best = tuple(text[-span:]), (0.0, 0, [])
    for size in range(1, len(context)):
        match = context[-size:]
        if not counts[match]:
            break
        limit = max(0, min(length, math.floor(size * factor + offset + 1e-6)))
        chances = []
        after = [counts[string] for string in counts if len(string) > size and string[:size] == match]
        for count in (sorted(after, reverse=True) if tree else max(ways(counts, match, span)))[:limit]:
            if count / counts[match] < min_prob:
                break
            chances.append(count / counts[match])
        if sum(chances) >= best[0] - 1e-9:
            best = (sum(chances), size, chances)
    return best
