"""A tree of fixed shape: a node takes the candidate of its rank (Medusa, section 2.1.2)."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.expand.base import Expander, Level, candidates, drawn_from
from specjax.tree import Topology, Tree, log_q_of

DEFAULT_CHOICES = (
    (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Static(Expander):
    """Children are the drafter's candidates of fixed ranks.

    Attributes:
      choices: rank paths, `((0,), (1,), (0, 0), ...)`.
      coupled: rank with the shared noise (True) or by probability alone.
    """

    about = About(
        "static",
        "a tree of fixed shape, given by child counts level by level",
        "arXiv:2401.10774, section 2.1.2",
        fields=("tree",),
        make="from_counts",
    )

    choices: tuple[tuple[int, ...], ...] = DEFAULT_CHOICES
    coupled: bool = True

    def __post_init__(self):
        if not self.choices:
            raise ValueError("static needs at least one choice")
        Topology.from_choices(self.choices)

    @classmethod
    def from_counts(cls, tree: str = "3 | 2 1 | 1 0 0 | 1 | 1", coupled: bool = True) -> "Static":
        """From child counts level by level; see `Topology.from_counts`.

        Raises:
          ValueError: where the text does not read so.
        """
        topology = Topology.from_counts(tree)
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return cls(tuple(paths[1:]), coupled)

    @property
    def topology(self) -> Topology:
        return Topology.from_choices(self.choices)

    @property
    def nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        return max(len(choice) for choice in self.choices)

    @property
    def is_chain(self) -> bool:
        return self.topology.is_chain

    @property
    def width(self) -> int:
        return 1 + max(max(choice) for choice in self.choices)

    @property
    def children(self):
        return "coupled" if self.coupled else "deterministic"

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        topology = self.topology
        parents, ranks, depths = (np.asarray(x) for x in (topology.parents, topology.ranks, topology.depths))
        above = topology.ancestors()
        columns, laws = {0: root}, {}
        scored: list[int] = []  # nodes with children, in the order they were scored; the root is not among them
        frontier = [0]
        logits = logits[:, None]
        for depth in range(self.depth):
            paths = None
            if depth:
                lines = [[int(m) for m in np.flatnonzero(above[n]) if m] for n in frontier]
                paths = functools.partial(_gather, dict(columns), lines)
            children = [np.flatnonzero(parents == n).tolist() for n in frontier]
            width = 1 + max(ranks[c].max() for c in children)
            few = candidates(
                sampler, logits, int(width), nodes=len(frontier), depth=depth, paths=paths, coupled=self.coupled
            )
            if keep_q and self.coupled:
                law = drawn_from(sampler, logits, paths, nodes=len(frontier))
                laws.update((node, law[:, row]) for row, node in enumerate(frontier))
            for row, group in enumerate(children):
                for node in group:
                    columns[node] = few.tokens[:, row, ranks[node]]
            frontier = [n for n in np.flatnonzero(depths == depth + 1).tolist() if (parents == n).any()]
            if not frontier:
                break
            seen = np.asarray([[above[n, m] for m in (*scored, *frontier)] for n in frontier])
            parent = [scored.index(parents[n]) if parents[n] else -1 for n in frontier]
            level = Level(
                tokens=jnp.stack([columns[n] for n in frontier], axis=1),
                parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), (root.shape[0], len(frontier))),
                visible=jnp.asarray(seen)[None],
                depth=depth + 1,
            )
            carry, logits = grow(carry, level)
            scored += frontier
        tokens = jnp.stack([columns[n] for n in range(self.nodes)], axis=1)
        log_q = log_q_of(laws, self.nodes) if laws else None
        return Tree.of(topology, tokens, tokens >= 0, log_q=log_q, children=self.children)


def _gather(columns, lines):
    return jnp.stack([jnp.stack([columns[node] for node in line], axis=1) for line in lines], axis=1)
