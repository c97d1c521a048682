"""K-SEQ (SpecTr; Sun et al. 2023): k i.i.d. drafts share the target's mass through an enlarged draft distribution."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, normalised, passing

Array = jax.Array

HALVINGS = 30
"""Halvings of the interval that contains the factor. A factor that is slightly too large costs acceptance, never the
distribution.
"""


@dataclasses.dataclass(frozen=True)
class KSeq(TopDown):
    """Each of k i.i.d. children passes with min(1, p(x) / (r q(x))), whatever was rejected before it; `factor` gives r.

    Lossless in distribution; it accepts at least 1 - (1 - 1/k)^k of what any rule for i.i.d. children accepts.
    """

    about = About(
        "k_seq",
        "try i.i.d. children against r q, with r so that they share the mass of p",
        "arXiv:2310.15141",
        "same distribution",
        tree="iid:length={depth}",
    )

    def enter(self, p, log_q, count):
        q = jnp.exp(log_q)
        drafts = jnp.maximum(count, 1).astype(p.dtype)
        r = factor(p, q, drafts)
        left = jnp.where((count > 0)[:, None], remainder(p, q, r, drafts), p)
        return p, r[:, None] * q, normalised(left, p)

    def chance(self, state, tokens):
        p, q = (jnp.take_along_axis(dist, tokens[:, None], axis=1)[:, 0] for dist in state[:2])
        return passing(p, q)

    def rejected(self, state, tokens):
        return state

    def rest(self, state):
        return state[2]


def overlap(p: Array, q: Array, r: Array) -> Array:
    """beta `[B]`, the chance that one draft passes: the mass of min(p / r, q)."""
    return jnp.clip(jnp.minimum(p / r[:, None], q).sum(axis=-1), 0, 1)


def some_pass(beta: Array, drafts: Array) -> Array:
    """1 - (1 - beta)^k `[B]`."""
    return -jnp.expm1(drafts * jnp.log1p(-beta))


def factor(p: Array, q: Array, drafts: Array) -> Array:
    """The least r `[B]` in [1, k] with which no token passes more often than p allows: 1 - (1 - beta(r))^k <= r beta(r).

    Args:
      p: `[B, V]`.
      q: `[B, V]`.
      drafts: `[B]`, k.
    """

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        beta = overlap(p, q, middle)
        too_small = some_pass(beta, drafts) > middle * beta
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    return jax.lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(drafts), drafts))[1]


def remainder(p: Array, q: Array, r: Array, drafts: Array) -> Array:
    """Weights `[B, V]` of the token if no draft passes: p minus the part of it that passes.

    Args:
      p: `[B, V]`.
      q: `[B, V]`.
      r: `[B]`, see `factor`.
      drafts: `[B]`, k.
    """
    beta = overlap(p, q, r)
    share = some_pass(beta, drafts) / jnp.where(beta > 0, r * beta, 1)
    return p - jnp.minimum(p, r[:, None] * q) * jnp.minimum(share, 1)[:, None]
