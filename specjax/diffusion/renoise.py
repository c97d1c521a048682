"""DiffusionGemma's sampler: what is kept of a canvas for the next pass, when it is final, and the temperature of a pass.

The entropy bound of Ben-Hamu et al. 2025 (arXiv:2505.24857) decides which predictions are kept; the rest of the rule is
the published model's own. In the shape descriptions `B` denotes rows, `W` the canvas, `V` the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.entropy_budget import within_budget

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settling:
    """How long a row's likeliest tokens have not changed.

    Attributes:
      last: `[B, W]` int32, those of the last pass; -1 before the first.
      same: `[B]` int32, how many passes in a row repeated the one before.
    """

    last: Array
    same: Array


@dataclasses.dataclass(frozen=True)
class EntropyRenoise:
    """Keeps the surest predictions, and puts random tokens in place of the others.

    A pass keeps the positions with the least entropy, as many as the sum of their entropies without the largest stays
    within `bound`. A canvas is final after `steps` passes. It is also final when its likeliest tokens have not changed
    for `stability` passes and the mean entropy is below `confidence`.

    Attributes:
      steps: N, passes over a canvas, at most.
      bound: in nats, more than 0.
      t_min: logits are divided by a temperature that falls linearly from `t_max` in the first pass: with n passes to
        come it is t_min + (t_max - t_min) n / N.
      t_max: see `t_min`.
      stability: with 0, tokens may change until the end.
      confidence: in nats; 0 never stops early.
    """

    about = About(
        "entropy_renoise",
        "keeps what is surest together, random tokens elsewhere",
        "arXiv:2505.24857, DiffusionGemma",
        "own text",
    )

    steps: int = 48
    bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1
    confidence: float = 0.005

    def __post_init__(self):
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (self.steps, self.stability))
        if not (whole and self.steps >= 1 and self.stability >= 0 and self.bound > 0 and self.confidence >= 0):
            raise ValueError(
                "entropy_renoise needs whole numbers steps >= 1 and stability >= 0, bound > 0 and confidence >= 0, "
                f"got {self}"
            )
        if not 0 <= self.t_min <= self.t_max or self.t_max <= 0:
            raise ValueError(f"entropy_renoise needs 0 <= t_min <= t_max and t_max > 0, got {self.t_min}, {self.t_max}")

    def heat(self, step: Array) -> Array:
        """The temperature `[B]` of a pass after `step` `[B]` passes over its canvas."""
        return self.t_min + (self.t_max - self.t_min) * ((self.steps - step) / self.steps)

    def init(self, batch: int, width: int) -> Settling:
        """The memory of a canvas before its first pass."""
        return Settling(jnp.full((batch, width), -1, jnp.int32), jnp.zeros((batch,), jnp.int32))

    def __call__(
        self, log_probs: Array, likeliest: Array, step: Array, memory: Settling
    ) -> tuple[Array, Array, Settling]:
        """The decision after one pass.

        Args:
          log_probs: `[B, W, V]` float32, after the temperature.
          likeliest: `[B, W]` int32, its most probable tokens.
          step: `[B]` int32, passes over the canvas before this one.
          memory: of the canvas.

        Returns:
          The positions to keep `[B, W]` bool, whether each canvas is final `[B]` bool, and the new memory.
        """
        dist = jnp.exp(log_probs)
        entropy = -jnp.sum(jnp.where(dist > 0, dist * log_probs, 0.0), axis=-1)
        keep = within_budget(entropy, -entropy, self.bound)
        same = jnp.where(jnp.all(likeliest == memory.last, axis=1), memory.same + 1, 0)
        settled = (same >= self.stability) & (jnp.mean(entropy, axis=-1) < self.confidence)
        return keep, settled | (step + 1 >= self.steps), Settling(likeliest, same)
