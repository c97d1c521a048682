"""Recursive rejection sampling of children that were drawn without replacement (RSD; Jeon et al. 2024)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, passing, residual, without

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RecursiveWOR(TopDown):
    """Tries children that were drawn without replacement; a rejected child leaves p as in `Recursive`, and also leaves q.

    p is updated with the q from which the child was drawn, which still includes the child itself.
    """

    about = About(
        "recursive_wor",
        "try children drawn without replacement, each against the residuals of p and q",
        "arXiv:2402.14160",
        "same distribution",
        tree="without_replacement:length={depth}",
    )

    judges = ("deterministic", "coupled", "without_replacement")

    def enter(self, p, log_q, count):
        return p, log_q

    def chance(self, state, tokens):
        p, log_q = (jnp.take_along_axis(values, tokens[:, None], axis=1)[:, 0] for values in state)
        return passing(p, jnp.exp(log_q))

    def rejected(self, state, tokens):
        p, log_q = state
        return residual(p, jnp.exp(log_q)), drawn_after(log_q, tokens)

    def rest(self, state):
        return state[0]


def drawn_after(log_q: Array, tokens: Array) -> Array:
    """The distribution of the next child, `[B, V]`: the same without `tokens` `[B]`.

    In logarithms, because the rest of a sharp q may be too small for float32, and is still drawn from.
    """
    left = without(log_q, tokens, -jnp.inf)
    mass = jax.nn.logsumexp(left, axis=1, keepdims=True)
    return jnp.where(mass > -jnp.inf, left - mass, -jnp.inf)
