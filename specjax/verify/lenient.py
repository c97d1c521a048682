"""Lenience (DistillSpec; Zhou et al. 2023, arXiv:2310.08461), lossy: the ordinary test with a larger p."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, at, normalised, residual, without

FORMS = {
    "linear": lambda p, epsilon: p / epsilon,
    "square": lambda p, epsilon: p / epsilon**2,
    "exponential": lambda p, epsilon: p**epsilon,
}
"""f(p, epsilon), at least p."""


@dataclasses.dataclass(frozen=True)
class Lenient(TopDown):
    """Tries i.i.d. children in the order of their draws: x passes with min(1, f(p(x), epsilon) / q(x)).

    Here f is p / epsilon, p / epsilon^2 or p^epsilon. After a rejection p becomes norm(max(p - q, 0)), as in the
    ordinary rule. For a child that is taken as it is, q(x) is 1.

    Lossy: tokens of which q has more than p pass too often, but tokens that p rules out never pass. Greedy rows keep
    greedy text, and at an epsilon of 1 it is `Recursive`, which for chains is `Rejection`. Trees, and the residual, are
    choices of this library.

    Attributes:
      epsilon: the lenience, in (0, 1]; the smaller, the more passes.
      form: "linear", "square" or "exponential".
    """

    about = About(
        "lenient",
        "accept with f(p, epsilon)/q, which is more than p/q",
        "arXiv:2310.08461",
        "lossy",
        tree="chain:length={depth}",
    )

    epsilon: float = 0.5
    form: str = "linear"

    def __post_init__(self):
        if not 0 < self.epsilon <= 1 or self.form not in FORMS:
            raise ValueError(f"lenient needs an epsilon in (0, 1] and form={' or '.join(FORMS)}, got {self}")

    def rule(self, tree):
        return self  # children that are taken as they are have a distribution too, with all of its mass at them

    def enter(self, p, log_q, count):
        return p, None if log_q is None else jnp.exp(log_q)

    def chance(self, state, tokens):
        p, q = state
        own = at(p, tokens)
        more = FORMS[self.form](own, self.epsilon)
        drawn = jnp.ones_like(own) if q is None else at(q, tokens)
        return jnp.where(own > 0, jnp.minimum(more / jnp.where(drawn > 0, drawn, 1), 1), 0)

    def rejected(self, state, tokens):
        p, q = state
        return normalised(without(p, tokens, 0), p) if q is None else residual(p, q), q

    def rest(self, state):
        return state[0]
