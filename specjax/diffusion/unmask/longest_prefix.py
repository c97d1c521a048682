"""All sure predictions before the first unsure one: SDLM's decoding (arXiv:2509.24007)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence, negative_entropy


@dataclasses.dataclass(frozen=True)
class LongestPrefix(Unmask):
    """Commits the open positions before the first prediction that is not sure, and at least the first one.

    Attributes:
      threshold: what a confidence must exceed.
      rule: `low_confidence` for the prediction's probability, `entropy` for one minus the entropy's share of the largest
        possible one, ln V.
    """

    about = About("longest_prefix", "from left to right, up to the first unsure one", "arXiv:2509.24007", "lossy")

    threshold: float = 0.9
    rule: str = "low_confidence"

    def __post_init__(self):
        if not self.threshold >= 0 or self.rule not in ("low_confidence", "entropy"):
            raise ValueError(f"longest_prefix needs threshold >= 0 and rule low_confidence or entropy, got {self}")

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        most = np.log(guess.log_probs.shape[-1])
        sure = confidence(guess) if self.rule == "low_confidence" else 1 + negative_entropy(guess) / most
        unsure = guess.masked & ~(sure > self.threshold)
        before = jnp.cumsum(unsure, axis=1) == 0
        place = jnp.broadcast_to(jnp.arange(sure.shape[1], dtype=jnp.float32)[None], sure.shape)
        return Choice(guess.masked & before, -place, guess.tokens), memory
