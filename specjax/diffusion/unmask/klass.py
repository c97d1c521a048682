"""KLASS (arXiv:2511.05664): tokens that are sure and whose distributions no longer move."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Lasting, confidence, ranks, scheduled_in

EPS = 1e-12  # inside logarithms, as in the original


@dataclasses.dataclass(frozen=True)
class Klass(Lasting):
    """Commits every token of the block that is sure enough, if its distribution has changed little in each of the last
    passes. If there is none, it commits as many of the surest as a schedule says.

    How much a distribution has changed is the divergence KL(now || one pass before) in nats, over the whole vocabulary.
    Passes over an earlier block count too. But nothing is stable before the block has had `history` passes.

    The original loses a schedule's tokens in passes with fewer stable ones, and may end with open positions. Here the
    surest one is committed until none is open.

    Attributes:
      threshold: a stable token's least probability, exclusive.
      kl: the divergence that it stays below.
      history: H, how many divergences.
      steps: of the schedule, per block; 0: one token per pass.
    """

    about = About("klass", "sure tokens whose distributions no longer move", "arXiv:2511.05664", "lossy")

    threshold: float = 0.9
    kl: float = 0.01
    history: int = 2
    steps: int = 0

    def __post_init__(self):
        if not self.threshold >= 0 or not self.kl >= 0 or self.history < 1 or self.steps < 0:
            raise ValueError(f"klass needs threshold >= 0, kl >= 0, history >= 1 and steps >= 0, got {self}")

    @property
    def warped(self):
        """The model's own probabilities, as in the original."""
        return False

    def init(self, batch, width, vocab_size):
        """The last distributions `[B, N, V]`, zeros before the first pass, and the last divergences `[B, N, H]`."""
        return jnp.zeros((batch, width, vocab_size)), jnp.full((batch, width, self.history), jnp.inf)

    def __call__(self, guess, memory):
        before, moved = memory
        view = guess.overview
        now = jnp.exp(view.log_own)
        kl = jnp.sum(now * (jnp.log(now + EPS) - jnp.log(before + EPS)), axis=-1)
        read = view.read[..., None]
        moved = jnp.where(read, jnp.concatenate([moved[..., 1:], kl[..., None]], axis=-1), moved)
        stable = (moved < self.kl).all(axis=-1) & (guess.step >= self.history - 1)[:, None]
        width = guess.masked.shape[1]
        at = (view.after - width - view.at[:, 0])[:, None] + jnp.arange(width)[None]
        stable = jnp.take_along_axis(stable, at, axis=1, mode="clip")
        score = confidence(guess)
        ready = guess.masked & stable & (score > self.threshold)
        count = scheduled_in(self.steps, guess.step, guess.entry, guess.rounded)
        scheduled = ranks(score, guess.masked) < count[:, None]
        commit = jnp.where(ready.any(axis=1, keepdims=True), ready, scheduled)
        return Choice(commit, score, guess.tokens), (jnp.where(read, now, before), moved)
