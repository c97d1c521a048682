"""A*: open partial solutions, ordered by their cost so far and ahead. Runs on the host; their content is up to the caller."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Node:
    """A partial solution.

    Attributes:
      state: identifies it; hashable.
      cost: g, the cost of the way to it.
      ahead: h, the estimated cost from it to a goal.
      goal: whether it is complete.
      own: the caller's data.
    """

    state: Any
    cost: float
    ahead: float = 0.0
    goal: bool = False
    own: Any = None

    @property
    def total(self) -> float:
        """f."""
        return self.cost + self.ahead


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one search.

    Attributes:
      node: the first popped goal. Without one, the open node to be popped next, goals first; None if no node is open.
      expanded: how many nodes were expanded.
      found: whether `node` is the first popped goal.
    """

    node: Node | None
    expanded: int
    found: bool


class Frontier:
    """The open nodes of one search.

    Args:
      width: how many are kept; if there are more, the worst are dropped. None keeps all.
      dropped: called with every node that is removed without being expanded.
    """

    def __init__(self, width: int | None = None, dropped: Callable[[Node], Any] = lambda node: None):
        self.width, self.dropped = width, dropped
        self.open: dict[Hashable, tuple[int, Node]] = {}
        self.best: dict[Hashable, float] = {}
        self.count = 0

    def push(self, node: Node) -> None:
        """Opens a node, unless a way to the same state that costs no more is known."""
        if self.best.get(node.state, float("inf")) <= node.cost:
            return self.dropped(node)
        self.best[node.state] = node.cost
        if node.state in self.open:
            self.dropped(self.open.pop(node.state)[1])
        self.open[node.state] = self.count, node
        self.count += 1
        if self.width is not None and len(self.open) > self.width:
            worst = max(self.open.values(), key=lambda pair: (pair[1].total, pair[0]))[1]
            del self.open[worst.state]
            del self.best[worst.state]  # it was never expanded, so a new way to it may open it again
            self.dropped(worst)
        return None

    def peek(self, goals: bool = False) -> Node | None:
        """The open node with the lowest f, on a tie the oldest; with `goals`, a goal if there is one."""
        able = [pair for pair in self.open.values() if pair[1].goal] if goals else []
        found = min(able or self.open.values(), key=lambda pair: (pair[1].total, pair[0]), default=None)
        return None if found is None else found[1]

    def pop(self) -> Node | None:
        """Removes and returns it."""
        node = self.peek()
        if node is not None:
            del self.open[node.state]
        return node


def best_first(
    frontiers: Sequence[Frontier],
    expand: Callable[[list[tuple[int, Node]]], list[list[Node]]],
    budget: int,
) -> list[Outcome]:
    """Several searches side by side, each until it pops a goal.

    Args:
      frontiers: each with the node that its search begins with.
      expand: from one node of every unfinished search, with the search's number, to the successors of each.
      budget: the most nodes that a search expands.
    """
    outcomes: list[Outcome | None] = [None] * len(frontiers)
    expanded = [0] * len(frontiers)
    while None in outcomes:
        chosen: list[tuple[int, Node]] = []
        for at, frontier in enumerate(frontiers):
            if outcomes[at] is not None:
                continue
            node = frontier.peek()
            if node is not None and not node.goal and expanded[at] < budget:
                chosen.append((at, frontier.pop() or node))
                continue
            found = node is not None and node.goal
            outcomes[at] = Outcome(node if found else frontier.peek(goals=True), expanded[at], found)
        for (at, _), children in zip(chosen, expand(chosen) if chosen else [], strict=True):
            expanded[at] += 1
            for child in children:
                frontiers[at].push(child)
    return [outcome for outcome in outcomes if outcome is not None]
