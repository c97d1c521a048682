"""Traversal verification (Weng et al. 2025): a tree is judged from its leaves up, by the joint distribution of each path."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.tree import Tree
from specjax.verify.base import Verifier
from specjax.verify.recursive_wor import drawn_after
from specjax.verify.top_down import Descent, at, judged_by, normalised, verdict_of, without

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
    """Goes through the tree children first: a node whose children have all failed is kept, path included, with the chance A.

    The root has A = 1, and a child with token x has min(1, A p(x) / q(x)). A child that fails leaves its parent A = s /
    (s + 1 - A) and p = norm(max(A p - q, 0)), where s is the mass of max(A p - q, 0), and q without x. For a chain this
    is `Block`. Lossless in distribution. The result depends on draws all over the tree, so each node needs separate
    draws, and each step separate noise.
    """

    about = About(
        "traversal",
        "judge a tree from its leaves up, by the joint distribution of each path",
        "arXiv:2505.12398",
        "same distribution",
        tree="without_replacement:length={depth}",
    )

    wants = Wants(logits=True)
    keep_q = True
    own_noise = True
    judges = ("deterministic", "without_replacement")

    def __call__(self, output, tree, sampler):
        p, finite, offered = judged_by(output, tree, sampler)
        return verdict_of(climb(p, offered, sampler.uniform_of(tree.depth)), finite, tree, sampler)


def climb(p: Array, tree: Tree, uniforms: Array) -> Descent:
    """The first node, children before parents, that is kept. The open nodes are those of one path, one per level.

    Args:
      p: `[B, N, V]`, the target's distribution at every node.
      tree: the tree to judge; only its valid nodes.
      uniforms: `[B, N]`; a node is kept if its uniform is below its weight; the root always is.

    Returns:
      The kept path; `chances` are in the order of the nodes.
    """
    batch, nodes, vocab = p.shape
    rows = jnp.arange(batch)
    root = jnp.zeros((batch,), jnp.int32)
    levels = tree.max_depth + 1
    dist = lambda dists, node: jnp.take_along_axis(dists, node[:, None, None], axis=1)[:, 0]

    def one(carry, event):
        node, leaves = event // 2, event % 2 == 1
        depth, tokens = at(tree.depth, node), jnp.maximum(at(tree.tokens, node), 0)
        active = at(tree.valid, node) & (carry[-1] < 0)  # nothing is kept yet
        above = jnp.maximum(depth - 1, 0)

        def enter(carry):
            weight, dist_p, dist_q, found, kept = carry
            q = None if dist_q is None else jnp.exp(at(dist(dist_q, above), tokens))
            joint = at(weight, above) * at(dist(dist_p, above), tokens)
            joint = joint if q is None else jnp.where(q > 0, joint / jnp.where(q > 0, q, 1), (joint > 0) * 1.0)
            own = jnp.where(node == 0, 1, jnp.minimum(joint, 1)).astype(p.dtype)
            put = lambda stack, new: stack.at[rows, depth].set(
                jnp.where((active & ~leaves).reshape(-1, *[1] * (new.ndim - 1)), new, stack[rows, depth])
            )
            dist_q = None if dist_q is None else put(dist_q, dist(tree.log_q, node))
            return put(weight, own), put(dist_p, dist(p, node)), dist_q, found, kept

        def leave(carry):
            weight, dist_p, dist_q, found, kept = carry
            chance = at(weight, depth)
            passes = active & leaves & ((at(uniforms, node) < chance) | (node == 0))
            found = jnp.where(passes[:, None], dist(dist_p, depth), found)
            fails = active & leaves & ~passes
            drawn = None if dist_q is None else dist(dist_q, above)
            own, left = after(at(weight, above), dist(dist_p, above), drawn, tokens)
            put = lambda stack, new: stack.at[rows, above].set(
                jnp.where(fails.reshape(-1, *[1] * (new.ndim - 1)), new, stack[rows, above])
            )
            dist_q = None if drawn is None else put(dist_q, drawn_after(drawn, tokens))
            return put(weight, own), put(dist_p, left), dist_q, found, jnp.where(passes, node, kept)

        chance = jnp.where(active & leaves, at(carry[0], depth), jnp.nan)
        carry = jax.lax.cond(jnp.any(active & ~leaves), enter, lambda carry: carry, carry)
        carry = jax.lax.cond(jnp.any(active & leaves), leave, lambda carry: carry, carry)
        return carry, chance

    stack = jnp.zeros((batch, levels, vocab), p.dtype)
    carry = (
        jnp.ones((batch, levels), p.dtype),
        stack,
        None if tree.log_q is None else stack,
        jnp.zeros((batch, vocab), p.dtype),
        root - 1,
    )
    events = visits(tree)
    (*_, weights, node), chances = jax.lax.scan(one, carry, events.T)
    left = jnp.argsort(events, axis=1)[:, 1::2]  # when each node is left
    return Descent(node, at(tree.depth, node), weights, jnp.take_along_axis(chances.T, left, axis=1)[:, 1:])


def after(weight: Array, p: Array, log_q: Array | None, tokens: Array) -> tuple[Array, Array]:
    """A parent's weight `[B]` and distribution `[B, V]` once its child of `tokens` `[B]` has failed.

    Args:
      weight: `[B]`, A before it.
      p: `[B, V]`.
      log_q: `[B, V]`, the distribution of the child's draw; None if it was taken as it is.
      tokens: `[B]`.
    """
    more = weight[:, None] * p
    more = without(more, tokens, 0) if log_q is None else jnp.maximum(more - jnp.exp(log_q), 0)
    mass = more.sum(axis=-1)
    below = mass + (1 - weight)  # where A is 1, exactly the mass
    return jnp.where(below > 0, mass / jnp.where(below > 0, below, 1), 1), normalised(more, p)


def visits(tree: Tree) -> Array:
    """Every node twice, `[B, 2 N]`: 2 n when n is entered, 2 n + 1 when it is left after all below it, siblings in order."""
    batch, nodes = tree.tokens.shape
    above = jnp.broadcast_to(tree.ancestors(), (batch, nodes, nodes))
    level = jnp.arange(tree.max_depth + 1)[None, None, :, None]
    here = above[:, :, None, :] & (tree.depth[:, None, None, :] == level)
    path = jnp.where(here.any(axis=-1), jnp.argmax(here, axis=-1), -1)  # [B, N, D + 1]
    both = jnp.stack([path, jnp.where(path < 0, nodes, path)], axis=2).reshape(batch, 2 * nodes, -1)
    # the two paths of a node at full depth are equal; the number puts entering before leaving
    keys = jnp.concatenate(
        [both, jnp.broadcast_to(jnp.arange(2 * nodes)[None, :, None], (batch, 2 * nodes, 1))], axis=2
    )
    return jax.vmap(lambda keys: jnp.lexsort(keys.T[::-1]))(keys).astype(jnp.int32)
