"""Efficient adaptive rejection sampling (EARS; Sun et al. 2025, arXiv:2512.13194), lossy: the less sure the target, the
looser the test.
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, at, normalised, passing, residual, without


@dataclasses.dataclass(frozen=True)
class Ears(TopDown):
    """Tries i.i.d. children in the order of their draws; the test has a tolerance.

    x passes with min(1, p(x) / q(x) + tolerance (1 - max p)); otherwise p becomes norm(max(p - q, 0)).

    Lossy: tokens of which q has more than p pass too often, but tokens that p rules out never pass. Greedy rows keep
    greedy text, and at a tolerance of 0 it is `Recursive`. Trees are this library's addition; the published rule tests
    chains, and is the same there.

    Attributes:
      tolerance: what is added to p(x) / q(x) if p is entirely unsure, in [0, 1].
    """

    about = About(
        "ears",
        "accept with p/q and more, the less sure the target is",
        "arXiv:2512.13194",
        "lossy",
        tree="chain:length={depth}",
    )

    tolerance: float = 0.3

    def __post_init__(self):
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"ears needs a tolerance in [0, 1], got {self}")

    def rule(self, tree):
        return self  # children that are taken as they are have a distribution too, with all of its mass at them

    def enter(self, p, log_q, count):
        return p, None if log_q is None else jnp.exp(log_q), self.tolerance * (1 - p.max(axis=-1))

    def chance(self, state, tokens):
        p, q, more = state
        own = at(p, tokens)
        ratio = own if q is None else passing(own, at(q, tokens))
        return jnp.where(own > 0, jnp.minimum(ratio + more, 1), 0)

    def rejected(self, state, tokens):
        p, q, more = state
        return normalised(without(p, tokens, 0), p) if q is None else residual(p, q), q, more

    def rest(self, state):
        return state[0]
