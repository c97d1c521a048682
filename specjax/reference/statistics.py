"""Comparing samples with an exact distribution."""

import numpy as np


def chi_square(counts: np.ndarray, dist: np.ndarray) -> float:
    """The p-value of counts under a distribution, both of the same shape; cells with an expected count below 5 are pooled.

    A count where the distribution is 0 gives 0.
    """
    from scipy import stats  # jax brings scipy; only tests need it here

    counts, dist = np.ravel(counts).astype(float), np.ravel(dist).astype(float)
    if counts[dist == 0].any():
        return 0.0
    expected = counts.sum() * dist / dist.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) < 2:
        return 1.0
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1))


def power(samples: int, cells: int, distance: float, alpha: float) -> float:
    """The least chance that `chi_square` < alpha for a distribution at this total variation distance from the tested one."""
    from scipy import stats

    return float(stats.ncx2.sf(stats.chi2.isf(alpha, cells - 1), cells - 1, 4 * samples * distance**2))
