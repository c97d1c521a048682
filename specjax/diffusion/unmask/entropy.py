"""All predictions with little entropy: dParallel's decoding (arXiv:2509.26488), and WeDLM's with a penalty on distance
(arXiv:2512.22737, section 4)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, negative_entropy


@dataclasses.dataclass(frozen=True)
class EntropyBound(Unmask):
    """Commits every prediction whose distribution has at most this entropy.

    Attributes:
      bound: in nats; `log V` commits a block at once.
      penalty: in nats, what a prediction's entropy is raised by for each position between it and the first open one.
    """

    about = About("entropy", "all of at most so much entropy", "arXiv:2509.26488", "lossy")

    bound: float = 0.5
    penalty: float = 0.0

    def __post_init__(self):
        if not self.bound >= 0 or not self.penalty >= 0:
            raise ValueError(f"entropy needs bound and penalty of at least 0 nats, got {self}")

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        score = negative_entropy(guess)
        if self.penalty:
            place = jnp.arange(score.shape[1])[None]
            score = score - self.penalty * (place - jnp.argmax(guess.masked, axis=1)[:, None])
        return Choice(-score <= self.bound, score, guess.tokens), memory
