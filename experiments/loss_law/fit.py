"""The loss of a model by its parameters N and its training tokens D."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

DELTA = 1e-3
"""Where the Huber loss of logarithms becomes linear, as in arXiv:2203.15556, appendix D.2."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A model after its training.

    Attributes:
      parameters: N.
      tokens: D, the tokens that it has learned to predict.
      loss: nats per held-out token.
      acceptance: the share of held-out tokens for which speculative sampling keeps its draft token.
    """

    parameters: int
    tokens: int
    loss: float
    acceptance: float


@dataclasses.dataclass(frozen=True)
class LossFit:
    """`L = E + A / N^a + B / D^b` (arXiv:2203.15556, equation 2)."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def of(self, parameters: int, tokens: int) -> float:
        return self.E + self.A / parameters**self.a + self.B / tokens**self.b

    @classmethod
    def fitted(cls, points: Sequence[Point]) -> "LossFit":
        """The better of two starts: the least Huber loss of the logarithms' differences."""
        n, d, loss = (np.log([getattr(point, name) for point in points]) for name in ("parameters", "tokens", "loss"))

        def differences(theta):
            e, big_a, a, big_b, b = theta
            return np.logaddexp(np.logaddexp(e, big_a - a * n), big_b - b * d) - loss

        starts = [(-1.0, 5.0, slope, 5.0, slope) for slope in (0.3, 1.0)]
        found = [least_squares(differences, start, loss="huber", f_scale=DELTA, max_nfev=500) for start in starts]
        e, big_a, a, big_b, b = min(found, key=lambda one: one.cost).x
        return cls(*(float(x) for x in (np.exp(e), np.exp(big_a), a, np.exp(big_b), b)))


def held_out(points: Sequence[Point]) -> Point:
    """The point that the fits do not see: the largest model after the longest training."""
    return max(points, key=lambda point: (point.parameters, point.tokens))


def predicted(points: Sequence[Point]) -> float:
    """The loss of the point held out, by a fit to all others."""
    own = held_out(points)
    return LossFit.fitted([point for point in points if point != own]).of(own.parameters, own.tokens)
