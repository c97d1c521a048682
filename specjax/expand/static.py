"""A tree of fixed shape: a node takes the candidate of its rank (Medusa, section 2.1.2)."""

import dataclasses

from specjax.about import About
from specjax.expand.base import candidates
from specjax.expand.fixed import FixedTree
from specjax.tree import Topology

DEFAULT_CHOICES = (
    (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Static(FixedTree):
    """A node's children are the drafter's candidates of fixed ranks.

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
          ValueError: if the text cannot be read so.
        """
        topology = Topology.from_counts(tree)
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return cls(tuple(paths[1:]), coupled)

    @property
    def topology(self) -> Topology:
        return Topology.from_choices(self.choices)

    def cut(self, depth):
        return dataclasses.replace(self, choices=tuple(path for path in self.choices if len(path) <= depth))

    @property
    def children(self):
        # `log_q` does not describe a second draw without the first
        return "coupled" if self.coupled and self.topology.leaves_out_none else "deterministic"

    def choose(self, sampler, logits, counts, *, depth, paths):
        nodes, k = len(counts), max(counts)
        return candidates(sampler, logits, k, nodes=nodes, depth=depth, paths=paths, coupled=self.coupled).tokens
