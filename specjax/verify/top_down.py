"""Rules that go down a tree: a node's children are tried one after the other, and the descent moves to the first that
passes.
"""

import abc
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from specjax.lm import Output, Wants
from specjax.sampling import Sampler
from specjax.sampling.sampler import best
from specjax.tree import Tree
from specjax.verify.base import Verdict, Verifier
from specjax.verify.rejection import SMALLEST

Array = jax.Array
State = Any


class Rule(Protocol):
    """A rule for trying children. All arrays lead with `[B]`; the state is a pytree of such arrays."""

    def enter(self, p: Array, log_q: Any, count: Array) -> State:
        """The state at a node before its first child.

        Args:
          p: `[B, V]`, the target's distribution there.
          log_q: `[B, V]`, the distribution of the children's draws; None if they are taken as they are.
          count: `[B]` int32, how many children there are; without any, p decides.
        """
        ...

    def compare(self, state: State, tokens: Array, offered: Array, noise: Any) -> State:
        """The state once it is known which children there are, for rules that choose among them.

        Args:
          state: from `enter`.
          tokens: `[B, N]` int32.
          offered: `[B, N]` bool, which of them are children here.
          noise: `[B, N, ...]` uniforms of each node, from `TopDown.noise`; None if a rule has none.
        """
        ...

    def chance(self, state: State, tokens: Array) -> Array:
        """The chance `[B]`, at most 1, with which a child of `tokens` `[B]` passes."""
        ...

    def rejected(self, state: State, tokens: Array) -> State:
        """The state after that child has not passed."""
        ...

    def rest(self, state: State) -> Array:
        """Weights `[B, V]` of the target's own token if no child has passed."""
        ...


class Descent(NamedTuple):
    """The end of a path down the tree.

    Attributes:
      node: `[B]` int32, the last node that passed.
      accepted: `[B]` int32, its depth.
      weights: `[B, V]` of the token after it.
      chances: `[B, N - 1]`, the chance with which each node was tested, in the order of the trials; NaN if it was not
        tried.
    """

    node: Array
    accepted: Array
    weights: Array
    chances: Array


class TopDown(Verifier):
    """A rule over children drawn from `log_q`; `TakenAsTheyAre` judges children that are taken as they are.

    Nothing below the last node is looked at, so noise keyed by position is fresh whenever it decides something.
    Children with equal tokens lead to one place: if such a child passes, the children of all of them are tried next.
    """

    wants = Wants(logits=True)
    keep_q = True
    judges = ("deterministic", "iid")

    @abc.abstractmethod
    def enter(self, p: Array, log_q: Array, count: Array) -> State:
        """See `Rule`, also for the next four."""

    def compare(self, state: State, tokens: Array, offered: Array, noise: Any) -> State:
        return state

    @abc.abstractmethod
    def chance(self, state: State, tokens: Array) -> Array: ...

    @abc.abstractmethod
    def rejected(self, state: State, tokens: Array) -> State: ...

    @abc.abstractmethod
    def rest(self, state: State) -> Array: ...

    def order(self, tree: Tree, sampler: Sampler) -> Array:
        """The nodes except the root in the order of the trials, `[B, N - 1]`.

        The order is level by level: which of several equal siblings passes is known before any of their children is
        tried.
        """
        return jnp.argsort(tree.depth.at[:, 0].set(-1), axis=1)[:, 1:]  # stable: siblings stay in order

    def rule(self, tree: Tree) -> Rule:
        """The rule for trying this tree's children."""
        return TakenAsTheyAre() if tree.log_q is None else self

    def noise(self, tree: Tree, sampler: Sampler) -> Any:
        """The noise of `compare`, `[B, N, ...]`; None for none."""
        return None

    def __call__(self, output, tree, sampler):
        p, finite, offered = judged_by(output, tree, sampler)
        noise, uniform = self.noise(tree, sampler), sampler.uniform_of(tree.depth)
        found = descend(self.rule(tree), p, offered, uniform, self.order(tree, sampler), noise)
        return verdict_of(found, finite, tree, sampler)


def judged_by(output: Output, tree: Tree, sampler: Sampler, soft: bool = False) -> tuple[Array, Array, Tree]:
    """The target's distributions `[B, N, V]`, whether they are valid `[B, N]`, and the tree without nodes below an
    invalid one.

    Greedy rows have one-hot distributions, or with `soft` the softmax of their logits at temperature 1.
    """
    logits = output.logits[:, : tree.nodes]
    if soft:
        p = jax.nn.softmax(sampler.warped(logits, tree.path_tokens), axis=-1)
    else:
        p = jnp.exp(sampler.log_probs(logits, tree.path_tokens))
    finite = jnp.isfinite(logits.max(axis=-1))
    valid = tree.valid & jnp.take_along_axis(finite, jnp.maximum(tree.parent, 0), axis=1)
    return p, finite, dataclasses.replace(tree, valid=valid)


def verdict_of(found: Descent, finite: Array, tree: Tree, sampler: Sampler) -> Verdict:
    """The verdict at the end of a path, with a draw from its weights; `finite` `[B, N]` comes from `judged_by`."""
    weights = found.weights
    noise = sampler.residual_noise(found.accepted, weights.shape[-1])
    token = best(jnp.where(weights > 0, jnp.log(weights), -jnp.inf) + noise)
    path = tree.path_to(found.node, tree.ancestors())
    return Verdict(path, found.accepted, jnp.where(at(finite, found.node), token, -1))


class TakenAsTheyAre:
    """Children without a record of how they came to be: the target's own draw decides. See `Rule`.

    x passes with the chance p(x) among the untried tokens, so one of the children passes with the sum of their chances.
    """

    def enter(self, p, log_q, count):
        return p

    def compare(self, state, tokens, offered, noise):
        return state

    def chance(self, state, tokens):
        return jnp.minimum(at(state, tokens), 1)

    def rejected(self, state, tokens):
        return normalised(without(state, tokens, 0), state)

    def rest(self, state):
        return state


def descend(rule: Rule, p: Array, tree: Tree, uniforms: Array, order: Array, noise: Any = None) -> Descent:
    """The path of every row from the root down.

    Args:
      rule: how children are tried.
      p: `[B, N, V]`, the target's distribution at every node.
      tree: the tree to try; only its valid nodes.
      uniforms: `[B, N]`; a node passes if its uniform is below its chance.
      order: `[B, N - 1]`, see `TopDown.order`.
      noise: see `TopDown.noise`.
    """
    above = jnp.maximum(tree.parent, 0)
    offered = tree.valid.at[:, 0].set(False)
    rows = jnp.arange(p.shape[0])[:, None]
    has_children = jnp.zeros(offered.shape, bool).at[rows, above].max(offered)
    dist = lambda dists, node: jnp.take_along_axis(dists, node[:, None, None], axis=1)[:, 0]
    below = lambda here: offered & jnp.take_along_axis(here, above, axis=1)

    def enter(here, node):
        """Enters `node` `[B]` and all nodes with the same tokens, `here` `[B, N]`."""
        offered = below(here)
        count = offered.sum(axis=1)
        node = jnp.where(count > 0, jnp.argmax(here & has_children, axis=1), node)
        log_q = None if tree.log_q is None else dist(tree.log_q, node)
        return rule.compare(rule.enter(dist(p, node), log_q, count), tree.tokens, offered, noise)

    def one(carry, node):
        tried = at(below(carry[0]), node)
        tokens = jnp.maximum(at(tree.tokens, node), 0)

        def trial():
            here, state, last, depth = carry
            chance = rule.chance(state, tokens)
            passes = tried & (at(uniforms, node) < chance)
            state = where(tried & ~passes, rule.rejected(state, tokens), state)

            def go():
                equal = below(here) & (tree.tokens == tokens[:, None])
                there = jnp.where(passes[:, None], equal, here)
                return there, where(passes, enter(there, node), state)

            here, state = jax.lax.cond(jnp.any(passes), go, lambda: (here, state))
            return (here, state, jnp.where(passes, node, last), depth + passes), jnp.where(tried, chance, jnp.nan)

        return jax.lax.cond(jnp.any(tried), trial, lambda: (carry, jnp.full(node.shape, jnp.nan, p.dtype)))

    root = jnp.zeros(p.shape[:1], jnp.int32)
    here = jnp.broadcast_to(jnp.arange(tree.nodes)[None] == 0, offered.shape)
    carry = here, enter(here, root), root, root
    (_, state, node, accepted), chances = jax.lax.scan(one, carry, order.T.astype(jnp.int32))
    return Descent(node, accepted, rule.rest(state), chances.T)


def passing(p: Array, q: Array) -> Array:
    """min(1, p / q); where q is 0, whether p is not."""
    return jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1), 1), (p > 0).astype(p.dtype))


def residual(p: Array, q: Array) -> Array:
    """norm(max(p - q, 0)) `[B, V]`; p if hardly anything is left."""
    return normalised(jnp.maximum(p - q, 0), p)


def normalised(weights: Array, otherwise: Array) -> Array:
    """Weights `[B, V]` as a distribution; `otherwise` `[B, V]` if their sum is rounding noise, at a bias below it."""
    mass = weights.sum(axis=-1, keepdims=True)
    return jnp.where(mass > SMALLEST, weights / jnp.where(mass > SMALLEST, mass, 1), otherwise)


def without(values: Array, tokens: Array, nothing: float) -> Array:
    """Values `[B, V]` with `nothing` at `tokens` `[B]`."""
    return jnp.where(jnp.arange(values.shape[1])[None] == tokens[:, None], nothing, values)


def at(values: Array, index: Array) -> Array:
    """Each row's own entry `[B]` of values `[B, M]`."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def where(rows: Array, new: State, old: State) -> State:
    """A state that is `new` in `rows` `[B]`."""
    pick = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(pick, new, old)
