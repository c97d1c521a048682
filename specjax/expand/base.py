"""The expander contract: decides which nodes to grow and which to keep; the drafter only scores frontiers."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.sampling import Sampler
from specjax.sampling.sampler import Paths, best
from specjax.tree import Children, Tree

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
"""`(carry, level) -> (carry, logits)`: the drafter's side. The logits are `[B, F, V]`, or `[B, 1, V]` where all nodes of the
level share one law. V may be fewer columns: those that the sampler is restricted to."""


class Expander(abc.ABC):
    """Grows a tree. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry."""

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
    def children(self) -> Children:
        """Static: how a node's children come to be; where they are drawn, `log_q` says from what."""
        return "deterministic"

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
          keep_q: whether the tree must carry `log_q`, where its children are drawn.
        """


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The best next tokens of F nodes.

    Attributes:
      tokens: `[B, F, k]` int32 target ids, best first; -1 where fewer are possible.
      worth: `[B, F, k]`, the log of how likely each is to be the target's token; -inf where there is none.
    """

    tokens: Array
    worth: Array


def candidates(
    sampler: Sampler,
    logits: Array,
    k: int,
    *,
    nodes: int = 1,
    depth: int = 0,
    paths: Paths | None = None,
    coupled: bool = True,
    tau: float = 1.0,
) -> Candidates:
    """The k best next tokens of every node of a level.

    Coupled: tokens are ranked by `log q + g` with the position's shared noise; given g, the worth of one is
    `log softmax((log q + g) / tau)`. Otherwise: by `log q` alone (EAGLE-2's confidence, at tau 1).

    Args:
      sampler: the step's sampler, restricted where the logits' columns are not the vocabulary.
      logits: `[B, F, V]` float32, or `[B, 1, V]` where the nodes share one law.
      k: how many a node.
      nodes: F.
      depth: of the nodes; 0 is the root.
      paths: makes `[B, F, depth]`, the tokens of each node's path, for the repetition penalty. A law shared by several
        nodes is penalised by the committed text alone.
      coupled: whether to use the noise.
      tau: temperature of the worth.
    """
    shared = logits.shape[1] != nodes
    paths = None if shared else paths
    scores = sampler.scores(logits, depth, paths) if coupled else sampler.warped(logits, paths)
    if k == 1:
        columns = best(scores)[:, :, None]
        values = jnp.where(columns >= 0, scores.max(axis=-1, keepdims=True), -jnp.inf)
    else:
        values, columns = jax.lax.top_k(scores, k)
    possible = values > -jnp.inf
    tokens = jnp.where(possible, sampler.tokens_of(jnp.maximum(columns, 0)), -1).astype(jnp.int32)
    worth = values / tau - jax.nn.logsumexp(scores / tau, axis=-1, keepdims=True)
    worth = jnp.where(possible, worth, -jnp.inf)
    if shared:
        shape = (logits.shape[0], nodes, k)
        tokens, worth = jnp.broadcast_to(tokens, shape), jnp.broadcast_to(worth, shape)
    return Candidates(tokens, worth)


def drawn_from(sampler: Sampler, logits: Array, paths: Paths | None = None, *, nodes: int = 1) -> Array:
    """The distribution that coupled `candidates` of every node of a level are drawn from, over the vocabulary.

    Args:
      sampler: see `candidates`, as are the others.
      logits: `[B, F, V]` float32, or `[B, 1, V]`.
      paths: likewise.
      nodes: F.

    Returns:
      `[B, F, V]` log-probabilities; one-hot in greedy rows.
    """
    shared = logits.shape[1] != nodes
    law = sampler.full(sampler.log_law(logits, None if shared else paths))
    return jnp.broadcast_to(law, (law.shape[0], nodes, law.shape[2]))
