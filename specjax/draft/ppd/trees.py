"""The trees of parallel prompt decoding: one for every number of prompt tokens that the last accepted node had.

In the shape descriptions `m` denotes prompt tokens, `N` nodes and `X` prompt slots of the largest tree.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from specjax.expand.search import chance, search_tree, shares
from specjax.tree import Topology


@dataclasses.dataclass(frozen=True)
class PromptTree:
    """A tree, and how many prompt tokens follow each of its nodes.

    Attributes:
      topology: ranks count the candidates of a node's depth.
      prompts: one count per node, 0..m.
    """

    topology: Topology
    prompts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tables:
    """Constants of the program, stacked over the states 0..m and padded.

    Attributes:
      parent, depth, rank: `[m + 1, N]` int32; -1 for the root's parent.
      real: `[m + 1, N]` bool, the nodes that a state has.
      above: `[m + 1, N, N]` bool, whether column j is row i or above it.
      prompts: `[m + 1, N]` int32, prompt tokens after each node.
      first: `[m + 1, N]` int32, the first prompt slot of each node.
      position: `[m + 1, X]` int32, a prompt slot's position minus the root's.
      step: `[m + 1, X]` int32, which of its node's prompt tokens a slot holds, from 0.
      member: `[m + 1, X]` int32, the slot's index in the ensemble.
      visible: `[m + 1, X, N + X]` bool: a prompt slot sees its node, the nodes above that, and the earlier prompt slots
        of the same node and ensemble.
    """

    parent: np.ndarray
    depth: np.ndarray
    rank: np.ndarray
    real: np.ndarray
    above: np.ndarray
    prompts: np.ndarray
    first: np.ndarray
    position: np.ndarray
    step: np.ndarray
    member: np.ndarray
    visible: np.ndarray


def parse(text: str) -> tuple[PromptTree, ...]:
    """The trees of states 0..m from a line of text.

    States 1..m are separated by `;`, each a tree and its prompts: `2 | 1 @ 2 1x3` is `Topology.from_counts("2 | 1")`
    with two prompt tokens after the root and one after each other node. The tree of state 0 is implied: the root alone,
    with all m prompt tokens.

    Raises:
      ValueError: if the text cannot be read so, or a tree of state n is deeper than the n predictions it is made from.
    """
    trees = []
    states = text.split(";")
    for state, part in enumerate(states, start=1):
        shape, _, counts = part.partition("@")
        topology = Topology.from_counts(shape)
        prompts: list[int] = []
        for word in counts.split():
            count, _, times = word.partition("x")
            if not count.isdecimal() or not (times or "1").isdecimal():
                raise ValueError(
                    f"ppd: {word!r} in {part.strip()!r} is neither a prompt count nor count x times, like 1x4"
                )
            prompts += [int(count)] * int(times or 1)
        if len(prompts) != len(topology.parents) or max(prompts) > len(states):
            raise ValueError(
                f"ppd: {part.strip()!r} needs a prompt count from 0 to {len(states)} for each of its "
                f"{len(topology.parents)} nodes, got {len(prompts)} of them"
            )
        if not 1 <= max(topology.depths) <= state:
            raise ValueError(
                f"ppd: the tree of state {state} must have 1 to {state} levels, got {max(topology.depths)}"
            )
        trees.append(PromptTree(topology, tuple(prompts)))
    return (PromptTree(Topology((-1,), (0,)), (len(trees),)), *trees)


def search_states(accuracy: Any, nodes: int, slots: int) -> str:
    """Trees for every state from measured acceptance (arXiv:2405.18628, section 4).

    A state's candidates are searched as in Medusa. Then every node gets all m prompt tokens, and the one whose removal
    costs least is removed, until `slots` are left. The cost is the chance that decoding stops at its node, times the
    loss of acceptance in the next step's tree.

    Args:
      accuracy: `[m, R]`, how often the candidate of a rank of each prompt token is the target's token.
      nodes: most tree nodes of a state, including the root.
      slots: most prompt tokens of a state, at least m.

    Returns:
      The input of `parse`.

    Raises:
      ValueError: for accuracies that are not shares, or with less room than a root, a node and m prompt tokens need.
    """
    accuracy = shares(accuracy)
    m, ranks = accuracy.shape
    if nodes < 2 or slots < m:
        raise ValueError(f"search_states needs at least 2 nodes and {m} prompt slots, got {nodes} and {slots}")
    sizes = [min(nodes, sum(ranks**level for level in range(state + 1))) for state in range(1, m + 1)]
    topologies = [
        Topology.from_choices(search_tree(accuracy[:state], size)) for state, size in enumerate(sizes, start=1)
    ]
    gains = np.diff([0.0] + [sum(chances(t, accuracy)[1:]) for t in topologies])
    parts = []
    for topology in topologies:
        ends = _ends(topology, accuracy)
        prompts = [m] * len(topology.parents)
        while sum(prompts) > slots:
            held = [node for node, count in enumerate(prompts) if count]
            least = min(held, key=lambda node: (ends[node] * gains[prompts[node] - 1], -node))
            prompts[least] -= 1
        parts.append(f"{topology.counts} @ {' '.join(map(str, prompts))}")
    return "; ".join(parts)


def tokens_per_step(text: str, accuracy: Any) -> float:
    """Expected tokens per step in the long run, including the target's own token.

    States follow each other as a Markov chain; each state is weighted by its long-run share, and contributes what its
    tree accepts.
    """
    accuracy = shares(accuracy)
    trees = parse(text)
    moves = np.zeros((len(trees), len(trees)))
    worth = np.zeros(len(trees))
    for state, tree in enumerate(trees):
        worth[state] = sum(chances(tree.topology, accuracy))
        for prompts, end in zip(tree.prompts, _ends(tree.topology, accuracy), strict=True):
            moves[state, prompts] += end
    system = np.vstack([moves.T - np.eye(len(trees)), np.ones(len(trees))])
    share = np.linalg.lstsq(system, np.append(np.zeros(len(trees)), 1.0), rcond=None)[0]
    return float(share @ worth)


def chances(topology: Topology, accuracy: np.ndarray) -> list[float]:
    """By node, the chance that it is accepted."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(topology.parents, topology.ranks, strict=True):
        paths.append(() if parent < 0 else (*paths[parent], rank))
    return [chance(accuracy, path) for path in paths]


def _ends(topology: Topology, accuracy: np.ndarray) -> np.ndarray:
    """By node, the chance that it is the last one accepted."""
    ends = np.array(chances(topology, accuracy))
    for parent, accepted in zip(topology.parents[1:], ends[1:].copy(), strict=True):
        ends[parent] -= accepted
    return ends


@functools.lru_cache(maxsize=16)
def tables(text: str, ensembles: int) -> Tables:
    """The constants of `parse(text)`, with `ensembles` slots for every prompt token."""
    trees = parse(text)
    nodes = max(len(tree.prompts) for tree in trees)
    slots = ensembles * max(sum(tree.prompts) for tree in trees)
    zeros = lambda *shape: np.zeros((len(trees), *shape), np.int32)  # noqa: E731
    parent, depth, rank, prompts, first = zeros(nodes), zeros(nodes) + 1, zeros(nodes), zeros(nodes), zeros(nodes)
    real = np.zeros((len(trees), nodes), bool)
    above = np.zeros((len(trees), nodes, nodes), bool) | np.eye(nodes, dtype=bool)[None]
    owner, step, member = zeros(slots), zeros(slots), zeros(slots)
    visible = np.zeros((len(trees), slots, nodes + slots), bool)
    visible[:, :, 0] = True
    visible[:, :, nodes:] = np.eye(slots, dtype=bool)
    for state, tree in enumerate(trees):
        count = len(tree.prompts)
        parent[state, :count], rank[state, :count] = tree.topology.parents, tree.topology.ranks
        depth[state, :count], prompts[state, :count] = tree.topology.depths, tree.prompts
        real[state, :count] = True
        above[state, :count, :count] = tree.topology.ancestors()
        slot = 0
        for node, held in enumerate(tree.prompts):
            first[state, node] = slot
            for index in range(held * ensembles):
                owner[state, slot], (step[state, slot], member[state, slot]) = node, divmod(index, ensembles)
                visible[state, slot, :nodes] = above[state, node]
                visible[
                    state, slot, nodes + first[state, node] + member[state, slot] : nodes + slot + 1 : ensembles
                ] = True
                slot += 1
    position = np.take_along_axis(depth, owner, axis=1) + 1 + step
    return Tables(parent, depth, rank, real, above, prompts, first, position, step, member, visible)
