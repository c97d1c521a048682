"""The greedy coupling of least entropy (arXiv:1701.08254, Algorithm 1), on the host in float64.

In the shape descriptions `N` denotes the values of a distribution, `M` distributions, `C` cells of a coupling.
"""

import heapq
import math

import numpy as np


def entropy(masses: np.ndarray) -> float:
    """The entropy of probabilities of any shape, in bits.

    >>> entropy(np.asarray([0.5, 0.25, 0.25, 0.0]))
    1.5
    """
    kept = masses[masses > 0]
    return float(-(kept * np.log2(kept)).sum()) + 0.0


def mutual_information(joint: np.ndarray) -> float:
    """The mutual information of the two sides of a joint distribution `[N, N']`, in bits.

    >>> mutual_information(np.asarray([[0.5, 0.0], [0.0, 0.5]]))
    1.0
    """
    return entropy(joint.sum(axis=1)) + entropy(joint.sum(axis=0)) - entropy(joint)


def distribution(given: np.ndarray, what: str) -> np.ndarray:
    """Probabilities `[N]` in float64 that sum to 1.

    Raises:
      ValueError: for another shape, a negative or undefined number, or a sum that is not 1 to a millionth.
    """
    masses = np.asarray(given, np.float64)
    if masses.ndim != 1 or not masses.size:
        raise ValueError(f"{what} must be a list of probabilities, got an array of shape {masses.shape}")
    if not (np.isfinite(masses).all() and (masses >= 0).all() and math.isclose(masses.sum(), 1, abs_tol=1e-6)):
        raise ValueError(f"{what} must be probabilities that sum to 1, got a sum of {masses.sum():.6g}")
    return masses / masses.sum()


def cells(*marginals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells of the greedy coupling: the likeliest values that are left meet, and take the smallest of their masses.

    Of equal masses the first value goes first. There are fewer cells than values of all distributions together.

    Args:
      *marginals: M probabilities `[N]` each, in float64.

    Returns:
      The values of each cell, `[C, M]` int64, in the order in which they met; and its mass, `[C]` float64.
    """
    heaps = []
    for masses in marginals:
        left = np.flatnonzero(masses > 0)
        heaps.append(list(zip((-masses[left]).tolist(), left.tolist(), strict=True)))
        heapq.heapify(heaps[-1])
    places, taken = [], []
    while all(heaps):
        mass = min(-heap[0][0] for heap in heaps)
        places.append([heap[0][1] for heap in heaps])
        taken.append(mass)
        for heap in heaps:
            rest, value = heap[0]
            if rest + mass < 0:
                heapq.heapreplace(heap, (rest + mass, value))
            else:
                heapq.heappop(heap)
    return np.asarray(places, np.int64).reshape(-1, len(marginals)), np.asarray(taken, np.float64)


def greedy_coupling(*marginals: np.ndarray) -> np.ndarray:
    """A joint distribution of given distributions whose entropy is low.

    For two distributions it has at most `log2(e) / e`, about 0.53, bits more than the least possible (arXiv:2302.11838).

    Args:
      *marginals: M distributions, `[N]` each.

    Returns:
      The joint distribution, one axis for each.

    Raises:
      ValueError: for none, or for what is no distribution.

    >>> greedy_coupling([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]).round(6).tolist()
    [[0.4, 0.1, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.2]]
    """
    if not marginals:
        raise ValueError("a coupling needs distributions: give at least one")
    checked = [distribution(own, f"distribution {number}") for number, own in enumerate(marginals)]
    places, masses = cells(*checked)
    joint = np.zeros([len(own) for own in checked])
    joint[tuple(places.T)] = masses
    return joint
