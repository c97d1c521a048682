"""All predictions with little entropy: dParallel's decoding (arXiv:2509.26488)."""

import dataclasses

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, negative_entropy


@dataclasses.dataclass(frozen=True)
class EntropyBound(Unmask):
    """Commits every prediction whose distribution has at most this entropy.

    Attributes:
      bound: in nats; `log V` commits a block at once.
    """

    about = About("entropy", "all of at most so much entropy", "arXiv:2509.26488", "lossy")

    bound: float = 0.5

    def __post_init__(self):
        if not self.bound >= 0:
            raise ValueError(f"the entropy bound must be at least 0 nats, got {self.bound}")

    def __call__(self, guess, memory):
        score = negative_entropy(guess)
        return Choice(-score <= self.bound, score, guess.tokens), memory
