"""The common part of drafters with a table of likely next tokens: a static tree whose nodes take candidates by rank."""

import dataclasses

from specjax.draft.base import Drafter
from specjax.lm import Wants
from specjax.tree import OfTopology, Topology


@dataclasses.dataclass(frozen=True)
class TableDrafter(OfTopology, Drafter):
    """A tree of fixed shape over the `k` candidates that a table holds for each node.

    Attributes:
      tree: child counts level by level (`Topology.from_counts`).
      k: candidates kept.
      vocab_size: filled in from the target.
    """

    tree: str = "1"
    k: int = 1
    vocab_size: int | None = None

    def __post_init__(self):
        if max(self.topology.ranks) >= self.k:
            name = type(self).__name__
            raise ValueError(f"{name}: the tree uses rank {max(self.topology.ranks)}, but only k={self.k} are kept")

    @property
    def topology(self) -> Topology:
        return Topology.from_counts(self.tree)

    @property
    def wants(self) -> Wants:
        return Wants(topk=self.k)

    def bind(self, target):
        if self.k > target.vocab_size:
            raise ValueError(
                f"{type(self).__name__}: k={self.k} is more than the vocabulary's {target.vocab_size} tokens"
            )
        return dataclasses.replace(self, vocab_size=target.vocab_size)
