"""What guessing tokens apart costs, exactly, where the joint distribution of a text is known.

A pass that commits the positions A given the known ones S draws each from its own distribution. The best that such a
product can do lies `C(A | S) = sum_i H(y_i | S) - H(y_A | S)` nats from the truth, and a whole schedule the sum of its
passes' C, in expectation.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

Joint = np.ndarray
"""`[V] * n` probabilities of the texts of n tokens."""
Policy = Callable[[dict[int, np.ndarray]], set[int]]
"""From {open position: its distribution `[V]`} to the positions to commit; the drawn tokens do not matter to it."""


def uniform(texts: Sequence[Sequence[int]], vocab_size: int) -> Joint:
    """The joint distribution of a text that is any of these, all equally likely."""
    joint = np.zeros((vocab_size,) * len(texts[0]))
    for text in texts:
        joint[tuple(text)] += 1 / len(texts)
    return joint


def permutations(n: int) -> Joint:
    """Any order of n different tokens: a shuffle."""
    return uniform(list(itertools.permutations(range(n))), n)


def replace_one(n: int) -> Joint:
    """Tokens 0 to n - 1 in order, one of them, anywhere, replaced by token n."""
    return uniform([[n if i == at else i for i in range(n)] for at in range(n)], n + 1)


def remove_one(n: int) -> Joint:
    """Tokens 0 to n - 1 in order without one of them."""
    return uniform([[i for i in range(n) if i != at] for at in range(n)], n)


def insert_one(n: int) -> Joint:
    """Tokens 0 to n - 1 in order with token n somewhere among them."""
    return uniform([[*range(at), n, *range(at, n)] for at in range(n + 1)], n + 1)


def chain(n: int, flip: float) -> Joint:
    """A symmetric binary Markov chain of n tokens."""
    joint = np.zeros((2,) * n)
    for text in itertools.product((0, 1), repeat=n):
        flips = sum(a != b for a, b in itertools.pairwise(text))
        joint[text] = 0.5 * flip**flips * (1 - flip) ** (n - 1 - flips)
    return joint


def dists(joint: Joint, known: dict[int, int]) -> dict[int, np.ndarray]:
    """The distribution of every open position, given the known tokens."""
    where = tuple(known.get(i, slice(None)) for i in range(joint.ndim))
    rest = joint[where]
    rest = rest / rest.sum()
    left = [i for i in range(joint.ndim) if i not in known]
    return {i: rest.sum(axis=tuple(k for k in range(len(left)) if k != axis)) for axis, i in enumerate(left)}


def entropy(dist: np.ndarray) -> float:
    """In nats."""
    some = dist[dist > 0]
    return float(-(some * np.log(some)).sum())


def price(joint: Joint, passes: Sequence[Sequence[int]]) -> float:
    """Nats lost by committing these sets of positions one after the other: the expected sum of C."""
    total, before = 0.0, set()
    over = lambda kept: entropy(joint.sum(axis=tuple(i for i in range(joint.ndim) if i not in kept)))
    for chosen in passes:
        # conditional entropies are differences of joint ones
        total += sum(over(before | {i}) - over(before) for i in chosen)
        total -= over(before | set(chosen)) - over(before)
        before |= set(chosen)
    return total


def decoded(joint: Joint, policy: Policy) -> Joint:
    """The distribution of the texts that a policy writes, drawing each committed token from its own distribution;
    exact, by recursion."""
    out = np.zeros_like(joint)

    def go(known: dict[int, int], chance: float) -> None:
        if len(known) == joint.ndim:
            out[tuple(known[i] for i in range(joint.ndim))] += chance
            return
        where = tuple(known.get(i, slice(None)) for i in range(joint.ndim))
        if not joint[where].sum() > 0:  # no text begins so: what follows is as invalid
            left = [i for i in range(joint.ndim) if i not in known]
            go(known | dict.fromkeys(left, 0), chance)
            return
        open_dists = dists(joint, known)
        chosen = sorted(policy(open_dists))
        for tokens in itertools.product(*(np.flatnonzero(open_dists[i]) for i in chosen)):
            share = math.prod(float(open_dists[i][t]) for i, t in zip(chosen, tokens, strict=True))
            go(known | {i: int(t) for i, t in zip(chosen, tokens, strict=True)}, chance * share)

    go({}, 1.0)
    return out


def divergence(truth: Joint, other: Joint) -> float:
    """KL(truth || other) in nats."""
    some = truth > 0
    return float((truth[some] * np.log(truth[some] / other[some])).sum())


def validity(truth: Joint, other: Joint) -> float:
    """The chance that a text drawn from `other` is possible."""
    return float(other[truth > 0].sum())
