"""The evolution of EvoPress (arXiv:2410.14649, algorithm 1): candidates under one budget, and rounds of selection.

All randomness comes from one `random.Random`, whose draws are in the published order. A candidate is a tuple of groups;
a group is a tuple of levels, one for each of its units. `n` denotes layers and `k` how many of them lose a part.
"""

import abc
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Candidate = tuple[tuple[int, ...], ...]
Cut = tuple[int, int]
"""A sequence of the text, by its index, and how many of its first tokens are read."""
Fitness = Callable[[Sequence[Candidate], Sequence[Cut]], Sequence[float]]
"""The fitness of candidates on the same tokens; the lowest is the best."""

_TRIES = 2000
"""Draws without a new candidate, after which a small space counts as used up."""
_MOST_CHANGES, _LEAST_SPENT = 10, 0.8
"""For budgets across sizes: the most changes of a child, and the least share of freed bits that it spends again."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A round of selection.

    Attributes:
      survivors: how many candidates go on.
      tokens: how many tokens each candidate reads.
    """

    survivors: int
    tokens: int


class Space(abc.ABC):
    """The candidates that keep a budget."""

    @abc.abstractmethod
    def first(self, rng: random.Random) -> Candidate:
        """A random candidate."""

    @abc.abstractmethod
    def child(self, rng: random.Random, population: Sequence[Candidate]) -> Candidate | None:
        """A changed copy of one of the population; None if the change is not allowed."""

    @property
    def start(self) -> Candidate | None:
        """Where a search begins; None: with the best of some random candidates."""
        return None


@dataclasses.dataclass(frozen=True)
class Drops(Space):
    """Which sublayers are left out: as many attentions as feed-forwards. Level 1 denotes one that is left out.

    Attributes:
      count: k, of each type.
      legal: for attention and feed-forward, which of the n layers may lose it.
      mutations: the most swaps of a child.

    Raises:
      ValueError: if so many cannot be chosen, or only in one way.
    """

    count: int
    legal: tuple[tuple[bool, ...], tuple[bool, ...]]
    mutations: int = 3

    def __post_init__(self):
        for what, legal in zip(("attentions", "feed-forwards"), self.legal, strict=True):
            if not 1 <= self.count < sum(legal):
                raise ValueError(
                    f"{self.count} of the {sum(legal)} {what} that may be left out leave nothing to choose: give a budget "
                    f"that leaves out from 1 to {sum(legal) - 1}"
                )

    @property
    def generations(self) -> int:
        """How many generations are published for n and k."""
        layers = len(self.legal[0])
        return max(1, int(self.count * (layers - self.count) / 1.5))

    def first(self, rng: random.Random) -> Candidate:
        chosen = [{*rng.sample([i for i, one in enumerate(legal) if one], self.count)} for legal in self.legal]
        layers = range(len(self.legal[0]))
        return tuple(tuple(int(i in own) for i in layers) for own in chosen)

    def child(self, rng: random.Random, population: Sequence[Candidate]) -> Candidate | None:
        groups = [list(group) for group in rng.choice(population)]
        for _ in range(flips(rng, self.mutations)):
            group = groups[rng.randint(0, 1)]
            goes, returns = _random(rng, group, 0), _random(rng, group, 1)
            group[goes], group[returns] = 1, 0
        pairs = [
            pair for group, legal in zip(groups, self.legal, strict=True) for pair in zip(group, legal, strict=True)
        ]
        allowed = all(legal or not gone for gone, legal in pairs)
        return tuple(map(tuple, groups)) if allowed else None


@dataclasses.dataclass(frozen=True)
class Levels(Space):
    """How many bits each matrix has. Levels are bits, and a change is a step to the next level.

    Groups are of equal sizes unless `across` is set; a change then takes from one member what it gives to another.

    Attributes:
      levels: ascending, at equal distances.
      sizes: by group, how many numbers each matrix has.
      bits: the most bits of a number, on average.
      across: whether bits may move between matrices of different sizes; the groups are then one.
      mutations: the most moves of a child.

    Raises:
      ValueError: on levels or an average that leave nothing to choose.
    """

    levels: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    bits: float
    across: bool = False
    mutations: int = 3

    def __post_init__(self):
        steps = {b - a for a, b in itertools.pairwise(self.levels)}
        if len(steps) != 1 or min(steps) < 1:
            raise ValueError(f"levels must ascend in equal steps, at least two of them, got {self.levels}")
        if not self.levels[0] < self.bits < self.levels[-1]:
            raise ValueError(
                f"an average of {self.bits:g} bits leaves nothing to choose among levels {self.levels}: give one between "
                f"{self.levels[0]} and {self.levels[-1]}"
            )

    generations = 150
    """As published."""

    @property
    def step(self) -> int:
        """Bits between two levels."""
        return self.levels[1] - self.levels[0]

    @property
    def most(self) -> int:
        """The budget in bits."""
        return sum(int(size * self.bits) for group in self.sizes for size in group)

    def spent(self, candidate: Candidate) -> int:
        """A candidate's bits."""
        pairs = zip(self.sizes, candidate, strict=True)
        return sum(size * level for sizes, group in pairs for size, level in zip(sizes, group, strict=True))

    @property
    def start(self) -> Candidate | None:
        if self.bits not in self.levels:
            return None
        return tuple((int(self.bits),) * len(group) for group in self.sizes)

    def first(self, rng: random.Random) -> Candidate:
        above = min(level for level in self.levels if level >= self.bits)
        groups = [[above] * len(group) for group in self.sizes]
        spent = self.spent(tuple(map(tuple, groups)))
        while spent > self.most:
            at, unit = self._random(rng, groups, -self.step)
            if unit is None:  # another group has one, as long as too much is spent
                continue
            groups[at][unit] -= self.step
            spent -= self.sizes[at][unit] * self.step
        return tuple(map(tuple, groups))

    def child(self, rng: random.Random, population: Sequence[Candidate]) -> Candidate | None:
        groups, count = [list(group) for group in population[0]], flips(rng, self.mutations)
        if self.across:
            return self._moved(rng, groups, self.spent(population[0]), count)
        for _ in range(count):
            at = self._group(rng)
            down, up = (self._unit(rng, groups[at], step) for step in (-self.step, self.step))
            if down is None or up is None:
                return None
            groups[at][down] -= self.step
            groups[at][up] += self.step
        return tuple(map(tuple, groups))

    def _moved(self, rng: random.Random, groups: list[list[int]], spent: int, count: int) -> Candidate | None:
        """Raises some levels, then lowers others until the budget is kept."""
        added = freed = 0
        for _ in range(count):
            at, unit = self._random(rng, groups, self.step)
            if unit is None:
                return None
            groups[at][unit] += self.step
            added += self.sizes[at][unit] * self.step
        while spent + added - freed > self.most:
            count += 1
            at, unit = self._random(rng, groups, -self.step)
            if unit is None:
                return None
            groups[at][unit] -= self.step
            freed += self.sizes[at][unit] * self.step
        fits = count <= _MOST_CHANGES and added / max(1, freed) >= _LEAST_SPENT
        return tuple(map(tuple, groups)) if fits else None

    def _group(self, rng: random.Random) -> int:
        """A random group, by the number of its members."""
        return rng.choices(range(len(self.sizes)), weights=[len(group) for group in self.sizes])[0]

    def _random(self, rng: random.Random, groups: list[list[int]], step: int) -> tuple[int, int | None]:
        at = self._group(rng)
        return at, self._unit(rng, groups[at], step)

    def _unit(self, rng: random.Random, group: list[int], step: int) -> int | None:
        """A random member whose next level exists; None if all are at the end."""
        may = [i for i, level in enumerate(group) if level + step in self.levels]
        return rng.choice(may) if may else None


def flips(rng: random.Random, most: int) -> int:
    """How many changes a child has: the lower of two draws, so that few are likelier.

    >>> rng = random.Random(0)
    >>> np.bincount([flips(rng, 3) for _ in range(9000)])[1:].round(-3).tolist()
    [5000, 3000, 1000]
    """
    return min(rng.randint(1, most), rng.randint(1, most))


def _random(rng: random.Random, group: Sequence[int], level: int) -> int:
    """A random unit of this level."""
    while True:
        unit = rng.randint(0, len(group) - 1)
        if group[unit] == level:
            return unit


def cuts(rng: random.Random, lengths: Sequence[int], tokens: int) -> list[Cut]:
    """Random different sequences of exactly so many tokens together; the last one is cut.

    Args:
      rng: where draws come from.
      lengths: of the sequences; together at least `tokens`.
      tokens: how many.
    """
    found: dict[int, int] = {}
    while (left := tokens - sum(found.values())) > 0:
        chosen = rng.randint(0, len(lengths) - 1)
        if chosen not in found:
            found[chosen] = min(lengths[chosen], left)
    return list(found.items())


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a generation leaves.

    Attributes:
      population: the survivors, the best one first.
      fitness: theirs, on the tokens of the last selection; `inf` for a start that was not measured.
      read: forward tokens so far, of all candidates.
    """

    population: tuple[Candidate, ...]
    fitness: tuple[float, ...]
    read: int


@dataclasses.dataclass(frozen=True)
class Evolution:
    """A search.

    Attributes:
      space: the candidates.
      lengths: of the text's sequences.
      fitness: see `Fitness`.
      offspring: children of a generation; fewer if there are no more.
      stages: rounds of selection. The survivors of the last one are the next population.
      initial: how many random candidates a search begins with, and the tokens that each reads, unless the space has a
        `start`.

    Raises:
      ValueError: on stages that keep more than they have, or read more tokens than there are.
    """

    space: Space
    lengths: Sequence[int]
    fitness: Fitness
    offspring: int
    stages: tuple[Stage, ...]
    initial: tuple[int, int]

    def __post_init__(self):
        check_rounds(self.space, self.offspring, self.stages, self.initial)
        asked, there = max(_tokens(self.space, self.stages, self.initial)), sum(self.lengths)
        if asked > there:
            raise ValueError(
                f"a round reads {asked} tokens, and the text has {there}: give more text, or rounds of fewer tokens"
            )

    def run(self, rng: random.Random) -> Iterator[Generation]:
        """Generations without end; the first one is the start."""
        if self.space.start is not None:
            now = Generation((self.space.start,), (math.inf,), 0)
        else:
            begun = _distinct(self.initial[0], lambda: self.space.first(rng), ())
            now = self._selected(rng, begun, Stage(self.stages[-1].survivors, self.initial[1]), 0)
        while True:
            yield now
            now = self._next(rng, now)

    def _next(self, rng: random.Random, now: Generation) -> Generation:
        children = _distinct(self.offspring, lambda: self.space.child(rng, now.population), now.population)
        after = Generation(tuple(children), (), now.read)
        for stage in self.stages:
            own = list(after.population)
            if stage.survivors == self.stages[-1].survivors:  # parents are measured anew, beside their children
                own += [parent for parent in now.population if parent not in own]
            after = self._selected(rng, own, stage, after.read)
        return after

    def _selected(self, rng: random.Random, candidates: Sequence[Candidate], stage: Stage, read: int) -> Generation:
        found = self.fitness(candidates, cuts(rng, self.lengths, stage.tokens))
        best = np.argsort(found, kind="stable")[: stage.survivors].tolist()
        kept = tuple(candidates[i] for i in best), tuple(float(found[i]) for i in best)
        return Generation(*kept, read + stage.tokens * len(candidates))


def check_rounds(space: Space, offspring: int, stages: Sequence[Stage], initial: tuple[int, int]) -> None:
    """Raises ValueError on rounds that keep more than they are given, or read too few tokens; see `Evolution`."""
    kept = [offspring, *(stage.survivors for stage in stages)]
    if len(kept) < 2 or any(b > a for a, b in itertools.pairwise(kept)) or min(kept) < 1:
        raise ValueError(
            f"a round of selection keeps at most what it is given, and at least one: {' to '.join(map(str, kept))} does not"
        )
    if kept[-1] > 1 and not isinstance(space, Drops):
        raise ValueError(f"a search of levels has one parent, so its last round keeps 1, not {kept[-1]}")
    if (least := min(_tokens(space, stages, initial))) < 2:
        raise ValueError(f"a round reads at least 2 tokens, not {least}")
    if space.start is None and initial[0] < kept[-1]:
        raise ValueError(f"{initial[0]} random candidates are fewer than the {kept[-1]} that go on")


def _tokens(space: Space, stages: Sequence[Stage], initial: tuple[int, int]) -> list[int]:
    """The tokens of every selection."""
    return [stage.tokens for stage in stages] + ([initial[1]] if space.start is None else [])


def _distinct(count: int, draw: Callable[[], Candidate | None], known: Sequence[Candidate]) -> list[Candidate]:
    """So many different candidates that are not known yet; fewer if no more turn up.

    Raises:
      ValueError: if there is none.
    """
    found: dict[Candidate, None] = {}
    tries = 0
    while len(found) < count and tries < _TRIES:
        one = draw()
        tries += 1
        if one is not None and one not in known and one not in found:
            found[one], tries = None, 0
    if not found:
        raise ValueError("no other candidate keeps the budget: give another budget, or more that may change")
    return list(found)
