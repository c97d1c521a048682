"""Oracle for `specjax.draft.aded`: the table as dictionaries, and the search over nodes that are objects."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

FACTOR, BASE = 6364136223846793005, 8


class Table:
    """Which tokens followed which pairs of tokens, how often; pairs share slots."""

    def __init__(self, slots: int, k: int):
        self.slots, self.k = slots, k
        self.pairs: dict[int, tuple[int, int]] = {}
        self.places: dict[int, list[list[int]]] = {}

    def add(self, grams: Iterable[Sequence[int]]) -> None:
        """Counts tri-grams that were seen together."""
        seen: dict[int, dict[tuple[int, int], collections.Counter]] = {}
        for a, b, c in grams:
            pairs = seen.setdefault((a * FACTOR + b) % self.slots, {})
            pairs.setdefault((a, b), collections.Counter())[c] += 1
        for slot, pairs in seen.items():
            pair = max(pairs)
            if self.pairs.get(slot) != pair:
                self.pairs[slot], self.places[slot] = pair, [[-1, 0] for _ in range(self.k)]
            places = self.places[slot]
            known = {token for token, _ in places}
            for place in places:
                place[1] += pairs[pair].get(place[0], 0)
            rarest = sorted(range(self.k), key=lambda i: places[i][1])
            new = sorted(set(pairs[pair]) - known)
            for i, token in zip(rarest, new, strict=False):
                places[i] = [token, pairs[pair][token]]

    def followers(self, pair: tuple[int, int]) -> list[tuple[int, float]]:
        """Tokens and their chances, the likeliest first."""
        slot = (pair[0] * FACTOR + pair[1]) % self.slots
        if min(pair) < 0 or self.pairs.get(slot) != pair:
            return []
        places = sorted((place for place in self.places[slot] if place[1]), key=lambda place: -place[1])
        total = sum(count for _, count in places)
        return [(token, float(np.float32(count) / np.float32(total))) for token, count in places]


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the search."""

    pair: tuple[int, int]
    parent: Any = None
    chance: float = 0.0
    children: list = dataclasses.field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    @property
    def way(self) -> tuple[int, ...]:
        """The tokens from below the root to it."""
        return () if self.parent is None else (*self.parent.way, self.pair[1])


def chosen(node: Node, explore: float) -> Node:
    """The child that the next visit goes to."""

    def worth(child):
        if not child.visits:
            return math.inf
        more = explore + math.log((node.visits + BASE + 1) / BASE)
        return child.value / child.visits + more * child.chance * math.sqrt(node.visits) / (1 + child.visits)

    return max(node.children, key=worth)


def searched(followers: Any, pair: tuple[int, int], rounds: int, length: int, explore: float) -> list[Node]:
    """All nodes after some rounds, in the order in which they were made, the root first."""
    root = Node(pair)
    made = [root]
    for _ in range(rounds):
        node, way = root, [root]
        while node.children and len(way) < length:
            node = chosen(node, explore)
            way.append(node)
        if len(way) < length:
            node.children = [Node((node.pair[1], token), node, chance) for token, chance in followers(node.pair)]
            made += node.children
            way += node.children[:1]
        worth, last, count = 1 + sum(node.chance for node in way), way[-1].pair, len(way)
        while count < length and followers(last):
            token, chance = followers(last)[0]
            worth, last, count = worth + chance, (last[1], token), count + 1
        for node in way:
            node.visits += 1
            node.value += worth
    return made


def draft(followers: Any, pair: tuple[int, int], paths: int, rounds: int, length: int, explore: float) -> list[tuple]:
    """The ways to all nodes of a draft: those most visited, then the likeliest next token of each."""
    made = searched(followers, pair, rounds, length, explore)[1:]
    kept = sorted(made, key=lambda node: -node.visits)[:paths]
    ways = [node.way for node in kept]
    further = [(*node.way, followers(node.pair)[0][0]) for node in kept if followers(node.pair)]
    return ways + [way for way in further if way not in ways]


def listed(store: Mapping[tuple[int, int], Mapping[int, float]]) -> Any:
    """`followers` of a table that is given as the chances of the tokens after every pair."""
    return lambda pair: sorted(store.get(pair, {}).items(), key=lambda item: -item[1])
