"""P2, path planning (arXiv:2502.03540): every pass plans anew which tokens are known."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, counted

KAPPAS = {
    "linear": lambda t: t,
    "sine": lambda t: np.sin(np.pi / 2 * t),
    "poly2": lambda t: t**2,
    "poly05": np.sqrt,
}
"""The share of the text that is known after a share t of the passes."""


@dataclasses.dataclass(frozen=True)
class PathPlanning(Unmask):
    """Opens the least sure of all new tokens in every pass, and writes open positions that are surer.

    After pass i of `steps`, the `int(n (1 - kappa(i / steps)))` least sure of n positions are open. How sure a position is
    is the log-probability of its likeliest token, known or open. That of a known one is multiplied by `eta`: below 1 known
    tokens stay longer, above 1 they go sooner, and at 0 they always stay. A token that stays is not rewritten.

    The paper's planner, another model whose log-probabilities known tokens have, is left out.

    Attributes:
      steps: passes per block; 0: as many as it has positions.
      eta: the weight of a known token's log-probability.
      kappa: a key of `KAPPAS`.
    """

    about = About("p2", "every pass plans anew which tokens stay known", "arXiv:2502.03540", "own text")

    steps: int = 0
    eta: float = 1.0
    kappa: str = "linear"

    def __post_init__(self):
        if self.steps < 0 or not self.eta >= 0 or self.kappa not in KAPPAS:
            raise ValueError(f"p2 needs steps >= 0, eta >= 0 and a kappa of {', '.join(KAPPAS)}, got {self}")

    @property
    def revises(self):
        return True

    @property
    def idle(self):
        return True

    @property
    def warped(self):
        """The model's own probabilities, as in the original."""
        return False

    def __call__(self, guess, memory):
        picked = jnp.take_along_axis(guess.log_probs, jnp.maximum(guess.tokens, 0)[..., None], axis=-1)[..., 0]
        ours = guess.masked | guess.committed
        score = jnp.where(guess.committed, self.eta * picked, picked)
        count = self.left(guess)
        least = jnp.sort(jnp.where(ours, score, jnp.inf), axis=1)
        low = ours & (score < jnp.take_along_axis(least, count[:, None], axis=1, mode="clip"))
        return Choice(guess.masked & ~low, picked, guess.tokens, guess.committed & low), memory

    def left(self, guess):
        """How many positions `[B]` are open after this pass, from a table in float64, as Python's numbers are."""
        total = np.arange(guess.masked.shape[1] + 1)[:, None]
        steps = np.full_like(total, self.steps) if self.steps else np.maximum(total, 1)
        done = np.arange(1, int(steps.max()) + 1)[None] / steps
        table = np.where(done < 1, total * (1 - KAPPAS[self.kappa](np.minimum(done, 1))), 0).astype(np.int32)
        return jnp.asarray(table)[counted(guess), jnp.minimum(guess.step, table.shape[1] - 1)]
