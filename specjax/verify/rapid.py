"""RAPID's rule (Chen et al. 2025, arXiv:2502.20330), lossy: the target's distribution is moved towards the draft's first."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.verify.top_down import TopDown, at, normalised, passing


@dataclasses.dataclass(frozen=True)
class RapidTransfer(TopDown):
    """Tries i.i.d. children in the order of their draws: x passes with min(1, p'(x) / q(x)), where p' is p moved towards q.

    p' = softmax(log p - eta d), where d is p - q at the tokens of which q has at least `alpha` of its largest chance, and
    0 elsewhere. After a rejection p becomes norm(max(p - q, p - p', 0)). The token after a whole chain is drawn from p.

    Lossy: a token's distribution is neither p nor p'. It is min(q, p'), and the rest of the mass goes to that residual.
    Tokens that p rules out never pass. With a draft over the right part of a long text it is meant to write better text
    than the target does.

    p is the row's, after temperature and filters. Greedy rows keep greedy text: as the temperature falls, any `eta` moves p
    ever less. A child that is taken as it is has a q with all of its mass there. With `eta=0` it is `Recursive`, which for
    chains is `Rejection`. Trees are this library's addition. `eta=0.1` is the published command's default; the paper's
    runs have 10 and more.

    Attributes:
      eta: how far p moves, at least 0.
      alpha: see above, in [0, 1].
    """

    about = About(
        "rapid",
        "accept with p'/q, where p' is p moved towards the draft's distribution",
        "arXiv:2502.20330",
        "lossy",
        tree="early_stop:length={depth},threshold=0.1",
    )

    eta: float = 0.1
    alpha: float = 0.1

    def __post_init__(self):
        if not (self.eta >= 0 and math.isfinite(self.eta)) or not 0 <= self.alpha <= 1:
            raise ValueError(f"rapid needs a finite eta >= 0 and alpha in [0, 1], got {self}")

    def moved(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """p' `[B, V]` of p and q `[B, V]`."""
        plausible = q >= self.alpha * q.max(axis=-1, keepdims=True)
        return jax.nn.softmax(jnp.log(p) - self.eta * jnp.where(plausible, p - q, 0), axis=-1)

    def rule(self, tree):
        return self  # children that are taken as they are have a distribution too, with all of its mass at them

    def enter(self, p, log_q, count):
        return p, None if log_q is None else jnp.exp(log_q)

    def chance(self, state, tokens):
        p, q = _both(state, tokens)
        return passing(at(self.moved(p, q), tokens), at(q, tokens))

    def rejected(self, state, tokens):
        p, q = _both(state, tokens)
        left = jnp.maximum(jnp.maximum(p - q, p - self.moved(p, q)), 0)
        return normalised(left, p), state[1]

    def rest(self, state):
        return state[0]


def _both(state, tokens):
    """p and q `[B, V]` where `tokens` `[B]` are tried."""
    p, q = state
    return p, jax.nn.one_hot(tokens, p.shape[-1]) if q is None else q
