"""The expander contract: decides which nodes to grow and which to keep; the drafter only scores frontiers."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from specjax.sampling import Sampler
from specjax.sampling.sampler import Paths
from specjax.tree import Tree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Level:
    """A frontier to be scored: F nodes of one depth.

    Attributes:
      tokens: `[B, F]` int32.
      parent: `[B, F]` int32, each node's parent among the P nodes scored so far, in order; -1 for the root.
      visible: `[B, F, P + F]` bool, which scored nodes and which of the frontier each node sees (itself, its ancestors).
      depth: static.
    """

    tokens: Array
    parent: Array
    visible: Array
    depth: int


Grow = Callable[[Any, Level], tuple[Any, Array]]
"""`(carry, level) -> (carry, logits [B, F, V])`: the drafter's side."""


class Expander(abc.ABC):
    """Grows a tree. Implementations are frozen dataclasses."""

    @property
    @abc.abstractmethod
    def nodes(self) -> int:
        """Static: tree nodes, the root included."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Static: the deepest node's depth."""

    @property
    def is_chain(self) -> bool:
        """Static: whether the tree is always a chain."""
        return False

    @property
    def rungs(self) -> tuple[int, ...]:
        """Static: see `specjax.draft.Drafter.rungs`."""
        return (self.nodes,)

    @property
    def width(self) -> int:
        """Static: the most candidates taken of one node."""
        return 1

    @abc.abstractmethod
    def __call__(
        self, root: Array, logits: Array, grow: Grow, carry: Any, sampler: Sampler, *, keep_q: bool = False
    ) -> Tree:
        """
        Args:
          root: `[B]` int32.
          logits: `[B, V]` float32, the draft's law after the root.
          grow: scores the next frontier.
          carry: whatever `grow` carries from level to level.
          sampler: the step's sampler, so that children are ranked with the target's own noise.
          keep_q: whether the tree must carry `log_q`.
        """


def ranking(
    sampler: Sampler, logits: Array, depth: int, paths: Paths | None, coupled: bool, tau: float
) -> tuple[Array, Array]:
    """How a node's candidates are ranked, and how likely each is to be the target's token.

    Coupled: candidates are ranked by `log q + g` with the position's shared noise; given g, the worth of one is
    `log softmax((log q + g) / tau)`. Otherwise: by `log q` alone (EAGLE-2's confidence, at tau 1).

    Args:
      sampler: the step's sampler.
      logits: `[B, F, V]` float32 of nodes at `depth`.
      depth: static.
      paths: makes `[B, F, depth]`, the tokens of each node's path, for the repetition penalty; None at the root.
      coupled: whether to use the noise.
      tau: temperature of the worth.

    Returns:
      Scores to rank by and log-worths, both `[B, F, V]`.
    """
    if coupled:
        scores = sampler.scores(logits, depth, paths)
    else:
        scores = sampler.warped(logits, paths)
    return scores, jax.nn.log_softmax(scores / tau, axis=-1)
