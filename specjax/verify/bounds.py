"""The bound for every exact verifier: the largest chance that one of a node's drafted children is accepted (arXiv:2502.18779).

A verifier that keeps the target's distribution is a coupling of the target's token with the drafts. The best coupling
accepts with probability `1 + min over H of P(H) - Q(H)`. Here H is a set of tokens, P(H) the target's chance of it, and
Q(H) the chance that all drafts lie in it. A best H consists of the tokens with the largest q / p.
"""

import numpy as np

Array = np.ndarray

LOG_TIMES = np.linspace(np.log(1e-8), np.log(1e16), 720)
"""Where the integral over an exponential clock is evaluated (logarithms of times)."""


def optimal_acceptance(p: Array, q: Array, drafts: int = 1, *, replacement: bool = False) -> float:
    """The largest acceptance rate of `drafts` children drawn from q, over all verifiers that keep p.

    Args:
      p: `[V]`, the target's distribution.
      q: `[V]`, the draft's.
      drafts: how many children.
      replacement: whether they are i.i.d.; False: drawn one after the other without replacement.

    Raises:
      ValueError: if p and q are not distributions over the same tokens, or `drafts` is less than 1.
    """
    p, q = _distributions(p, q)
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, got {drafts}")
    ratio = np.divide(q, p, out=np.full_like(q, np.inf), where=p > 0)
    ratio = np.where(q > 0, ratio, -1.0)  # tokens that are never drafted come last
    order = np.argsort(-ratio, kind="stable")
    p, q = p[order], q[order]
    inside = np.cumsum(q) ** drafts if replacement else _all_within_prefixes(q, drafts)
    return float(1 + min(0.0, np.min(np.cumsum(p) - inside)))


def greedy_acceptance(p: Array, q: Array, drafts: int = 1) -> float:
    """The acceptance rate of the likeliest `drafts` - 1 tokens of q with one draw from the rest, by the best verifier.

    Args:
      p: see `optimal_acceptance`, also for q and drafts.

    Raises:
      ValueError: see `optimal_acceptance`.
    """
    p, q = _distributions(p, q)
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, got {drafts}")
    order = np.argsort(-q, kind="stable")
    top, rest = order[: drafts - 1], order[drafts - 1 :]
    left = q[rest].sum()
    return float(p[top].sum() + (np.minimum(p[rest], q[rest] / left).sum() if left > 0 else 0.0))


def _distributions(p: Array, q: Array) -> tuple[Array, Array]:
    p, q = (np.asarray(dist, np.float64) for dist in (p, q))
    if p.ndim != 1 or p.shape != q.shape or min(p.min(), q.min()) < 0 or max(abs(p.sum() - 1), abs(q.sum() - 1)) > 1e-4:
        raise ValueError(f"p and q must be distributions over the same tokens, got shapes {p.shape} and {q.shape}")
    return p / p.sum(), q / q.sum()


def _all_within_prefixes(q: Array, drafts: int) -> Array:
    """The chance, for every m, that draws without replacement all lie among the first m tokens, `[V]`.

    The draws are the first exponential clocks of rates q to ring. They all lie within a prefix if enough of its clocks
    ring before the first of the other clocks. The time of that one is exponential too; its distribution is integrated
    over a grid.
    """
    possible = int((q > 0).sum())
    drafts = min(drafts, possible)  # where nothing is left, no more is drawn
    times = np.exp(LOG_TIMES)
    fewer = np.zeros((drafts, len(times)))  # the chance that exactly 0, 1, ... of the clocks so far have rung
    fewer[0] = 1.0
    rest = np.maximum(1 - np.cumsum(q), 0.0)
    found = np.ones(len(q))
    step = np.diff(LOG_TIMES)
    for m, rate in enumerate(q):
        rung = -np.expm1(-rate * times)
        fewer[1:] = fewer[1:] * (1 - rung) + fewer[:-1] * rung
        fewer[0] *= 1 - rung
        if rest[m] > 1e-15:
            density = rest[m] * times * np.exp(-rest[m] * times) * (1 - fewer.sum(axis=0))
            found[m] = np.sum((density[1:] + density[:-1]) / 2 * step)
    return found
