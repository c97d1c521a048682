"""Greedy multi-draft verification (Hu et al. 2025, arXiv:2502.18779): one ordinary test, and a look among the likeliest
tokens.
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, at, normalised, passing, residual, where, without


@dataclasses.dataclass(frozen=True)
class GreedyMulti(TopDown):
    """Tests the drawn child first, then the likeliest tokens.

    The drawn child x passes with min(1, p(x) / q(x)), where q is the draft's distribution without its likeliest tokens.
    Otherwise the target's token is a draw from norm(max(p - q, 0)), and a child that equals it passes.

    q is 0 at the likeliest tokens, so they keep all of p. One of k children passes with their p plus the sum of min(p,
    q) over the rest, the most that any verifier can reach with such children. Lossless in distribution.
    """

    about = About(
        "greedy_multi",
        "try the drawn child against p/q, and look for the target's own draw among the likeliest",
        "arXiv:2502.18779",
        "same distribution",
        tree="greedy_draft:length={depth}",
    )

    judges = ("deterministic", "greedy")

    def order(self, tree, sampler):
        if tree.log_q is None:
            return super().order(tree, sampler)
        rows, above = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        drawn = tree.log_q[rows, above, jnp.maximum(tree.tokens, 0)] > -jnp.inf
        return jnp.argsort((2 * tree.depth - drawn).at[:, 0].set(-1), axis=1)[:, 1:]  # ahead of its siblings

    def enter(self, p, log_q, count):
        return p, log_q

    def chance(self, state, tokens):
        p, log_q = (at(values, tokens) for values in state)
        return jnp.where(log_q > -jnp.inf, passing(p, jnp.exp(log_q)), jnp.minimum(p, 1))

    def rejected(self, state, tokens):
        p, log_q = state
        others = normalised(without(p, tokens, 0), p)
        return where(at(log_q, tokens) > -jnp.inf, residual(p, jnp.exp(log_q)), others), log_q

    def rest(self, state):
        return state[0]
