"""Couplings under a rate (arXiv:2410.21666): one side is first written in few bits, and the other side follows from these.

In the shape descriptions `X` denotes the values of the source, `T` those of the code, `Y` those of the output.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from specjax.search.coupling.greedy import distribution, entropy, greedy_coupling, mutual_information

ENUMERATED = 8
"""Up to so many values all ways to put them into groups are compared, 4,140 at most."""
SLACK = 1e-12
"""Bits that an entropy may lie above the rate by rounding."""
HALVINGS = 60
"""How often an interval of masses is halved, so that the code's entropy is the rate to rounding."""


@dataclasses.dataclass(frozen=True)
class BottleneckCoupling:
    """A source and an output that are coupled through a code.

    Attributes:
      code: `[X, T]`, the joint distribution of source and code.
      output: `[T, Y]`, that of code and output, a coupling of little entropy.
    """

    code: np.ndarray
    output: np.ndarray

    @property
    def joint(self) -> np.ndarray:
        """`[X, Y]`: output and source are independent given the code."""
        return self.code @ (self.output / self.output.sum(axis=1, keepdims=True))

    @property
    def rate(self) -> float:
        """The code's entropy in bits."""
        return entropy(self.code.sum(axis=0))

    @property
    def information(self) -> float:
        """What the output says about the source, in bits."""
        return mutual_information(self.joint)


def bottleneck_coupling(source: np.ndarray, output: np.ndarray, rate: float) -> BottleneckCoupling:
    """Couples an output with a source that is known only through a code of so many bits.

    The code is `compressed`, and the output follows it by the greedy coupling. At a rate of the source's entropy or more
    this is the greedy coupling of both.

    Args:
      source: `[X]`, a distribution.
      output: `[Y]`, a distribution.
      rate: bits, 0 or more.

    Raises:
      ValueError: for what is no distribution, or a rate that is no number from 0 on.
    """
    code = compressed(source, rate)
    return BottleneckCoupling(code, greedy_coupling(code.sum(axis=0), output))


def compressed(source: np.ndarray, rate: float) -> np.ndarray:
    """A code of at most so many bits that says much about its source (entropy-bounded information maximisation).

    A code that is a function of the source says as much as its entropy. The best such function is found by trying all of
    up to 8 values, and greedily for more: its entropy is then at most `h(p_2)` below the rate, for the second largest
    probability and the entropy `h` of a coin. What is left of the rate is used by values whose code is drawn. Mass of the
    value with the least share of its group moves to a code of its own; or, from the next function above the rate, to the
    likeliest code. Of the two, the code that says more is returned.

    Args:
      source: `[X]`, a distribution.
      rate: bits, 0 or more.

    Returns:
      `[X, T]`, the joint distribution of source and code, the likeliest code first.

    Raises:
      ValueError: for what is no distribution, or a rate that is no number from 0 on.

    >>> compressed([0.25, 0.25, 0.25, 0.25], 1.0).sum(axis=0).tolist()
    [0.5, 0.5]
    """
    masses = distribution(source, "the source")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate >= 0:
        raise ValueError(f"rate must be a number of bits from 0 on, got {rate!r}")
    below, above = _functions(masses, float(rate))
    candidates = [_spread(_table(masses, below), float(rate))]
    if above is not None:
        candidates.append(_gathered(_table(masses, above), float(rate)))
    best = max(candidates, key=mutual_information)
    sums = best.sum(axis=0)
    order = np.argsort(-sums, kind="stable")
    return best[:, order[sums[order] > 0]]


Groups = list[list[int]]


def _functions(masses: np.ndarray, rate: float) -> tuple[Groups, Groups | None]:
    """The best function of the source within the rate that is found, and the next one above it; None if all fit."""
    bits = lambda groups: entropy(_sums(masses, groups))
    values = np.flatnonzero(masses > 0).tolist()
    if len(values) <= ENUMERATED:
        every = [(bits(groups), groups) for groups in _partitions(values)]
        within, over = ([own for own in every if (own[0] <= rate + SLACK) == fits] for fits in (True, False))
        least = min(over, key=lambda own: own[0])[1] if over else None
        return max(within, key=lambda own: own[0])[1], least
    groups: Groups = [[value] for value in values]
    above = None
    while bits(groups) > rate + SLACK:
        above, groups = groups, _merged(masses, groups, rate)
    return groups, above


def _sums(masses: np.ndarray, groups: Groups) -> np.ndarray:
    """The mass of every group."""
    return np.asarray([math.fsum(masses[group]) for group in groups])


def _merged(masses: np.ndarray, groups: Groups, rate: float) -> Groups:
    """The groups after a merge of two: the one within the rate that keeps most bits, or else that of the two likeliest."""
    sums = _sums(masses, groups)
    own = lambda mass: -mass * np.log2(mass)
    both = sums[:, None] + sums[None]
    after = entropy(sums) - (own(sums)[:, None] + own(sums)[None] - own(both))
    usable = (after <= rate + SLACK) & (np.arange(len(sums))[:, None] < np.arange(len(sums))[None])
    if usable.any():
        pair = np.unravel_index(int(np.where(usable, after, -np.inf).argmax()), after.shape)
    else:
        pair = np.argsort(-sums, kind="stable")[:2]
    first, second = sorted(map(int, pair))
    return [[*groups[first], *groups[second]], *(group for at, group in enumerate(groups) if at not in (first, second))]


def _partitions(values: list[int]) -> Iterator[Groups]:
    """All ways to put values into groups."""
    if not values:
        yield []
        return
    for groups in _partitions(values[1:]):
        yield [[values[0]], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [values[0], *group], *groups[at + 1 :]]


def _table(masses: np.ndarray, groups: Groups) -> np.ndarray:
    """The joint distribution of a source and its groups, with free columns for codes of single values."""
    table = np.zeros((len(masses), len(groups) + len(masses)))
    for column, group in enumerate(groups):
        table[group, column] = masses[group]
    return table


def _spread(table: np.ndarray, rate: float) -> np.ndarray:
    """The table after mass has moved to free columns, up to the rate."""
    while entropy(table.sum(axis=0)) < rate - SLACK and (taken := _smallest(table, None)) is not None:
        row, column = taken
        free = int(np.flatnonzero(table.sum(axis=0) == 0)[0])
        table, whole = _moved(table, row, column, free, rate, rises=True)
        if not whole:
            break
    return table


def _gathered(table: np.ndarray, rate: float) -> np.ndarray:
    """The table after mass has moved to the likeliest code, down to the rate."""
    largest = int(table.sum(axis=0).argmax())
    while entropy(table.sum(axis=0)) > rate + SLACK and (taken := _smallest(table, largest)) is not None:
        table, _ = _moved(table, *taken, largest, rate, rises=False)
    return table


def _smallest(table: np.ndarray, but: int | None) -> tuple[int, int] | None:
    """The cell with the least share of its column, other than the column `but`; None if none shares its column.

    Cells that are alone in their column are taken last if there is a column to leave out.
    """
    sums = table.sum(axis=0)
    shares = np.where(table > 0, table / np.where(sums > 0, sums, 1), np.inf)
    if but is not None:
        shares[:, but] = np.inf
    row, column = np.unravel_index(int(shares.argmin()), shares.shape)
    alone = shares[row, column] == 1 and but is None
    return None if alone or np.isinf(shares[row, column]) else (int(row), int(column))


def _moved(table, row, column, to, rate, rises):
    """The table with as much of a cell's mass in another column as the rate allows (or needs), and whether that is all."""

    def after(mass):
        made = table.copy()
        made[row, column] = whole - mass
        made[row, to] += mass
        return made

    whole = table[row, column]
    within = lambda made, slack=0.0: entropy(made.sum(axis=0)) <= rate + slack
    if within(after(whole), SLACK) == rises:
        return after(whole), True
    low, high = 0.0, whole
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(after(middle)) == rises else (low, middle)
    return after(low if rises else high), False
