"""The expander contract: it decides which nodes to grow and which to keep; the drafter only scores frontiers."""

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
"""`(carry, level) -> (carry, logits)`: the drafter's side.

The logits are `[B, F, V]`, or `[B, 1, V]` if all nodes of the level share one distribution. V may be fewer columns, to
which the sampler is then restricted.
"""


class Expander(abc.ABC):
    """Grows a tree. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry."""

    needs_shared: ClassVar[bool] = False
    """Whether it takes only drafters whose levels each have one distribution (`TreeDrafter.shared`)."""

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
        """Static: how a node's children come to be; if they are drawn, `log_q` is the distribution of the draws."""
        return "deterministic"

    @property
    def rungs(self) -> tuple[int, ...]:
        """Static: see `specjax.draft.Drafter.rungs`."""
        return (self.nodes,)

    @property
    def width(self) -> int:
        """Static: the most candidates taken from one node."""
        return 1

    def cut(self, depth: int) -> "Expander":
        """The same, no deeper than `depth`, if there is such a tree; otherwise this one."""
        return self

    @abc.abstractmethod
    def __call__(
        self, root: Array, logits: Array, grow: Grow, carry: Any, sampler: Sampler, *, keep_q: bool = False
    ) -> Tree:
        """Grows a tree below the root.

        Args:
          root: `[B]` int32.
          logits: `[B, V]` float32, the draft's distribution after the root.
          grow: scores the next frontier.
          carry: whatever `grow` carries from level to level.
          sampler: the step's sampler, so that children are ranked with the target's own noise.
          keep_q: whether the tree must carry `log_q` if its children are drawn.
        """


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The best next tokens of F nodes.

    Attributes:
      tokens: `[B, F, k]` int32 target ids, best first; -1 where fewer are possible.
      worth: `[B, F, k]`, the log of the chance that each is the target's token; -inf where there is none.
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

    If `coupled`, tokens are ranked by `log q + g` with the position's shared noise; given g, the worth of one is
    `log softmax((log q + g) / tau)`. Otherwise they are ranked by `log q` alone (EAGLE-2's confidence, at tau 1).

    Args:
      sampler: the step's sampler, restricted if the logits' columns are not the whole vocabulary.
      logits: `[B, F, V]` float32, or `[B, 1, V]` if the nodes share one distribution.
      k: how many per node.
      nodes: F.
      depth: of the nodes; 0 is the root.
      paths: makes `[B, F, depth]`, the tokens of each node's path, for the repetition penalty. A distribution that
        several nodes share is penalised for the committed text alone (`Sampler.each`).
      coupled: whether to use the noise.
      tau: temperature of the worth.
    """
    logits, paths = sampler.each(logits, nodes, paths)
    shared = logits.shape[1] != nodes
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
    """The distribution from which coupled `candidates` of every node of a level are drawn, over the vocabulary.

    Args:
      sampler: see `candidates`, also for the other arguments.
      logits: `[B, F, V]` float32, or `[B, 1, V]`.
      paths: see `candidates`.
      nodes: F.

    Returns:
      `[B, F, V]` log-probabilities; one-hot in greedy rows.
    """
    dist = sampler.full(sampler.log_probs(*sampler.each(logits, nodes, paths)))
    return jnp.broadcast_to(dist, (dist.shape[0], nodes, dist.shape[2]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Draws without replacement from the distributions of F nodes; the likeliest tokens in greedy rows.

    Attributes:
      tokens: `[B, F, k]` int32 target ids, in the order of the draws; -1 where nothing is left.
      log_q: `[B, F, k]`, the distribution's log-probability of each; -inf where there is none.
      noisy: `[B, F, k]`, the same plus the Gumbel noise with which they were drawn.
      left: `[B, F, 1]`, the log of the distribution's mass outside them.
    """

    tokens: Array
    log_q: Array
    noisy: Array
    left: Array


def draws(sampler: Sampler, logits: Array, k: int, *, nodes: int, depth: int, paths: Paths | None) -> Draws:
    """k draws from the distribution of every node of a level, with each node's own noise. See `candidates` for the
    arguments.
    """
    batch, _, columns = logits.shape
    logits, paths = sampler.each(logits, nodes, paths)
    every = lambda scores: jnp.broadcast_to(jax.nn.log_softmax(scores, axis=-1), (batch, nodes, columns))

    def with_noise():
        log_q = every(sampler.warped(logits, paths))
        sampled = (sampler.params.temperature > 0)[:, None, None]
        return log_q, jnp.where(sampled, log_q + sampler.children_noise(depth, nodes, columns), log_q)

    def without():
        log_q = every(sampler.penalised(logits, paths))
        return log_q, log_q

    if sampler.greedy:
        log_q, noisy = without()
    else:
        log_q, noisy = jax.lax.cond(jnp.any(sampler.live & (sampler.params.temperature > 0)), with_noise, without)
    values, found = jax.lax.top_k(noisy, k)
    possible = values > -jnp.inf
    taken = (jnp.arange(columns)[None, None, None] == found[..., None]).any(axis=2)
    return Draws(
        tokens=jnp.where(possible, sampler.tokens_of(found), -1).astype(jnp.int32),
        log_q=jnp.where(possible, jnp.take_along_axis(log_q, found, axis=2), -jnp.inf),
        noisy=jnp.where(possible, values, -jnp.inf),
        left=jax.nn.logsumexp(jnp.where(taken, -jnp.inf, log_q), axis=2, keepdims=True),
    )


def skippable(pred: Array, on: Callable[[Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    """`on(carry)`; if the scalar `pred` is false, zeros in its shapes, except that a carry with unchanged shapes is kept."""
    shapes = jax.eval_shape(on, carry)
    same = jax.tree.structure(carry) == jax.tree.structure(shapes[0]) and all(
        jnp.shape(a) == b.shape for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(shapes[0]), strict=True)
    )
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    return jax.lax.cond(pred, on, lambda carry: (carry if same else zeros(shapes[0]), zeros(shapes[1])), carry)
