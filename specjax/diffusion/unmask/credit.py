"""Evidence gathered over passes: CreditDecoding (arXiv:2510.06133)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Credit(Wrapper):
    """Raises the probability of tokens that were the likeliest in earlier passes; another policy then decides.

    A token's credit grows by `p ** gamma` in each pass in which it is the likeliest at an open position, and is
    multiplied by `beta` per pass. Its logit rises by `alpha * log(1 + credit)`.

    Attributes:
      inner: decides on the raised distributions.
      alpha: 0 leaves them as they are.
      beta: the share of a credit that remains after a pass.
      gamma: how much a pass's own confidence counts.
    """

    about = About(
        "credit", "raises what earlier passes predicted; put before another policy", "arXiv:2510.06133", "lossy"
    )

    alpha: float = 0.7
    beta: float = 0.8
    gamma: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if self.alpha < 0 or not 0 <= self.beta <= 1 or self.gamma < 0:
            raise ValueError(f"credit needs alpha >= 0, beta in [0, 1] and gamma >= 0, got {self}")

    @property
    def warped(self):
        """The model's own probabilities, as in dInfer, unless the inner policy says otherwise."""
        return bool(self.inner.warped)

    def init(self, batch, width, vocab_size):
        return jnp.zeros((batch, width, vocab_size)), self.inner.init(batch, width, vocab_size)

    def sees(self, memory):
        return self.inner.sees(memory[1])

    def __call__(self, guess, memory):
        credit, inner = memory
        likeliest = jnp.argmax(guess.log_probs, axis=-1).astype(jnp.int32)
        gain = jnp.where(guess.masked, jnp.exp(self.gamma * guess.log_probs.max(axis=-1)), 0.0)
        credit = self.beta * credit + gain[..., None] * jax.nn.one_hot(likeliest, credit.shape[-1])
        raised = jax.nn.log_softmax(guess.log_probs + self.alpha * jnp.log1p(credit), axis=-1)
        # a drawn token stays drawn; a greedy one follows the raised distribution
        finite = guess.tokens >= 0
        greedy = jnp.where(finite, jnp.argmax(raised, axis=-1), -1).astype(jnp.int32)
        tokens = jnp.where(guess.sampled[:, None], guess.tokens, greedy)
        choice, inner = self.inner(dataclasses.replace(guess, tokens=tokens, log_probs=raised), inner)
        return choice, (credit, inner)
