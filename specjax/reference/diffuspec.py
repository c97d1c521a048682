"""DiffuSpec's search and its causal model, one path and one count at a time."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

Causal = Callable[[Sequence[int], int], float]
"""From the path so far and a token to the token's log-probability."""


def candidates(log_p: Sequence[float], ends: Sequence[int], mass: float, most: int) -> dict[int, float]:
    """A slot's candidates with their log-probabilities: the smallest set of likeliest tokens of a mass, and an end of text."""
    kept: dict[int, float] = {}
    for token in sorted(range(len(log_p)), key=lambda token: -log_p[token])[:most]:
        if sum(map(math.exp, kept.values())) >= mass:
            break
        kept[token] = log_p[token]
    if ends:
        end = max(ends, key=lambda token: log_p[token])
        kept.setdefault(end, log_p[end])
    return kept


def slots(log_p: Sequence[Sequence[float]], ends: Sequence[int], k: int) -> tuple[int, int]:
    """How many slots a path may have, and how many tokens were generated before the first end of text."""
    likeliest = [max(range(len(row)), key=row.__getitem__) for row in log_p]
    first = next((slot for slot, token in enumerate(likeliest) if token in ends), len(log_p))
    return min(k, first + 1), min(k, first)


def beam(
    lattice: Sequence[Mapping[int, float]], ends: Sequence[int], causal: Causal, beams: int, weight: float
) -> tuple[int, ...]:
    """The best path of a beam search; finished paths stay and compete."""
    held: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for slot in lattice:
        grown: list[tuple[tuple[int, ...], float]] = []
        for path, worth in held:
            if path and path[-1] in ends:
                grown.append((path, worth))
                continue
            for token, log_p in slot.items():
                grown.append((path + (token,), worth + weight * log_p + (1 - weight) * causal(path, token)))
        held = sorted(grown, key=lambda one: -one[1])[:beams]
    return held[0][0]


def paths(lattice: Sequence[Mapping[int, float]], ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every path: through all slots, or to its first end of text."""
    found = set()
    for path in itertools.product(*lattice):
        first = next((at for at, token in enumerate(path) if token in ends), len(path))
        found.add(path[: first + 1])
    return iter(found)


def worth(path: Sequence[int], lattice: Sequence[Mapping[int, float]], causal: Causal, weight: float) -> float:
    """What a path is worth."""
    terms = (weight * lattice[at][token] + (1 - weight) * causal(path[:at], token) for at, token in enumerate(path))
    return sum(terms)


def chance(texts: Sequence[Sequence[int]], context: Sequence[int], token: int, vocab_size: int, prior: float) -> float:
    """The smoothed probability of a token after a context of at most two tokens, by counts in some texts."""
    found = 1 / vocab_size
    for size in range(len(context) + 1):
        before = list(context[len(context) - size :])
        follow = [text[at] for text in texts for at in range(size, len(text)) if list(text[at - size : at]) == before]
        found = (follow.count(token) + prior * found) / (len(follow) + prior)
    return found
