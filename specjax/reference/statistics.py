"""How samples are compared with an exact law."""

import numpy as np


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of counts under a law, both of any one shape; cells expected below 5 are pooled.

    A count where the law is 0 gives 0.
    """
    from scipy import stats  # jax brings scipy; nothing but tests needs it here

    counts, law = np.ravel(counts).astype(float), np.ravel(law).astype(float)
    if counts[law == 0].any():
        return 0.0
    expected = counts.sum() * law / law.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) < 2:
        return 1.0
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1))


def power(samples: int, cells: int, distance: float, alpha: float) -> float:
    """The least chance that `chi_square` < alpha for a law at this total variation distance from the tested one."""
    from scipy import stats

    return float(stats.ncx2.sf(stats.chi2.isf(alpha, cells - 1), cells - 1, 4 * samples * distance**2))
