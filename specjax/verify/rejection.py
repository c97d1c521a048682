"""Rejection sampling for chains (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About, abouts
from specjax.lm import Wants
from specjax.sampling.sampler import best
from specjax.tree import Tree
from specjax.verify.base import Verdict, Verifier

Array = jax.Array

SMALLEST = 1e-6
"""A residual with less mass is rounding noise: p replaces it, at a bias below this in total variation."""


@dataclasses.dataclass(frozen=True)
class Rejection(Verifier):
    """Accepts x with probability min(1, p(x) / q(x)); a draw of norm(max(p - q, 0)) replaces the first rejected token.

    Lossless in distribution for chains, but the text differs from plain sampling's at the same seed. Positions below a
    rejection are never looked at, so noise keyed by position is fresh whenever it decides something.
    """

    about = About(
        "rejection",
        "accept with min(1, p/q), else draw the residual; chains only",
        "arXiv:2211.17192",
        "same distribution",
        tree="chain:length={depth}",
    )

    wants = Wants(logits=True)
    keep_q = True

    def check(self, drafter):
        super().check(drafter)
        if not drafter.is_chain:
            raise ValueError(
                f"the {abouts(type(self))[0].name} verifier takes chains, and this drafter proposes a tree "
                f"({drafter.nodes} nodes, depth {drafter.depth}): choose a chain expander, or the coupled verifier"
            )

    def check_chain(self, tree: Tree) -> None:
        """Raises ValueError for any other tree: node counts alone do not tell, because EAGLE-2 may keep D + 1 nodes."""
        if tree.max_depth and not tree.is_chain:
            raise ValueError(
                f"the {abouts(type(self))[0].name} verifier takes chains, and this tree is not one: choose a chain expander"
            )

    def __call__(self, output, tree, sampler):
        self.check_chain(tree)
        logits = output.logits[:, : tree.nodes]
        p = jnp.exp(sampler.log_probs(logits, tree.path_tokens))  # [B, D + 1, V]
        finite = jnp.isfinite(logits.max(axis=-1))
        q = draft_probs(tree, p.shape[-1])  # [B, D, V]
        uniforms = sampler.uniform(tree.max_depth)
        accepted = count_accepted(p[:, :-1], q, tree.tokens[:, 1:], uniforms, tree.valid[:, 1:] & finite[:, :-1])
        weights = residual(p, q, tree.valid[:, 1:], accepted)
        noise = sampler.residual_noise(accepted, p.shape[-1])
        token = best(jnp.where(weights > 0, jnp.log(weights), -jnp.inf) + noise)
        stopped = jnp.take_along_axis(finite, accepted[:, None], axis=1)[:, 0]
        steps = jnp.arange(tree.max_depth + 1)[None]
        path = jnp.where(steps <= accepted[:, None], steps, -1).astype(jnp.int32)
        return Verdict(path, accepted, jnp.where(stopped, token, -1))


def draft_probs(tree, vocab: int) -> Array:
    """The distribution of each of a chain's tokens, `[B, D, V]`: the recorded one, or one-hot for a token that is taken
    as it is.
    """
    if tree.log_q is not None:
        return jnp.exp(tree.log_q[:, :-1])
    return jax.nn.one_hot(tree.tokens[:, 1:], vocab)


def count_accepted(p: Array, q: Array, tokens: Array, uniforms: Array, valid: Array) -> Array:
    """The number of drafted tokens that pass, `[B]` int32. All arguments lead with `[B, D]`.

    The test is `u q < p`, strict and without a division: a token with p = 0 never passes.
    """
    at = jnp.maximum(tokens, 0)[:, :, None]
    passes = uniforms * jnp.take_along_axis(q, at, axis=2)[:, :, 0] < jnp.take_along_axis(p, at, axis=2)[:, :, 0]
    return jnp.cumprod((passes & valid).astype(jnp.int32), axis=1).sum(axis=1)


def residual(p: Array, q: Array, valid: Array, accepted: Array) -> Array:
    """Weights `[B, V]` of the next token: max(p - q, 0) at a rejected node, p if nothing was proposed.

    Args:
      p: `[B, D + 1, V]`.
      q: `[B, D, V]`.
      valid: `[B, D]`, whether node i + 1 was proposed.
      accepted: `[B]`.
    """
    proposed = jnp.pad(jnp.where(valid[:, :, None], q, 0.0), ((0, 0), (0, 1), (0, 0)))
    here = accepted[:, None, None]
    p_here = jnp.take_along_axis(p, here, axis=1)[:, 0]
    left = jnp.maximum(p_here - jnp.take_along_axis(proposed, here, axis=1)[:, 0], 0.0)
    return jnp.where(left.sum(axis=-1, keepdims=True) > SMALLEST, left, p_here)
