"""Recursive rejection sampling of i.i.d. children (Jeon et al. 2024): the ordinary test, repeated on the residual of p."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, passing, residual


@dataclasses.dataclass(frozen=True)
class Recursive(TopDown):
    """Tries i.i.d. children in the order of their draws: x passes with min(1, p(x) / q(x)), else p becomes norm(max(p -
    q, 0)).

    Lossless in distribution: after any rejection, p is the distribution that the target's token must have.
    """

    about = About(
        "recursive",
        "try i.i.d. children in their order, each against the residual of p",
        "arXiv:2402.14160",
        "same distribution",
        tree="iid:length={depth}",
    )

    def enter(self, p, log_q, count):
        return p, jnp.exp(log_q)

    def chance(self, state, tokens):
        p, q = (jnp.take_along_axis(dist, tokens[:, None], axis=1)[:, 0] for dist in state)
        return passing(p, q)

    def rejected(self, state, tokens):
        p, q = state
        return residual(p, q), q

    def rest(self, state):
        return state[0]
