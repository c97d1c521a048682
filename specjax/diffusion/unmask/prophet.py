"""Early commit: once the answer is settled, all open positions are committed (Prophet, arXiv:2508.19982)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Prophet(Wrapper):
    """Commits the whole canvas once the gap between the two likeliest logits, averaged over the answer, is wide enough.

    Until then another policy decides. Gaps are between the model's own logits, whatever the temperature. If the
    answer's place is not given, the smallest gap of the block's open positions replaces the average, and only the block
    is committed.

    Attributes:
      inner: decides until then.
      early: the necessary gap in the first third of the passes, in nats. With an answer the passes are those of all
        blocks, by the inner policy's `steps` or at one token each; without, those of one block at one token each.
      middle: in the second third.
      late: after that.
      answer: where the answer begins in the new text, from 0.
      length: of the answer; 0 if its place is not known.
    """

    about = About("prophet", "commits all once it is settled; put before another policy", "arXiv:2508.19982", "lossy")

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5
    answer: int = 0
    length: int = 0

    def __post_init__(self):
        super().__post_init__()
        if any(gap != gap for gap in (self.early, self.middle, self.late)):
            raise ValueError(f"prophet's gaps must be numbers, got {self}")
        if self.answer < 0 or self.length < 0:
            raise ValueError(f"prophet needs answer >= 0 and length >= 0, got {self}")
        if self.answer and not self.length:
            raise ValueError(f"prophet has an answer that begins at {self.answer} and no length: give length too")

    @property
    def room(self):
        return max(self.answer + self.length, self.inner.room)

    @property
    def whole(self):
        return self.length > 0 or self.inner.whole

    def __call__(self, guess, memory):
        choice, memory = self.inner(guess, memory)
        if not self.length:
            settled = self._wide(self._smallest(guess), guess.step / jnp.maximum(guess.entry, 1))
            return dataclasses.replace(choice, commit=choice.commit | (guess.masked & settled[:, None])), memory
        view = guess.overview
        answer = (view.place >= self.answer) & (view.place < self.answer + self.length)
        read = jnp.sum(answer & view.read, axis=1)
        mean = jnp.sum(jnp.where(answer & view.read, _gap(view), 0.0), axis=1) / jnp.maximum(read, 1)
        steps = getattr(self.inner, "steps", 0) or guess.masked.shape[1]
        settled = (
            (read > 0) & (read == answer.sum(axis=1)) & self._wide(mean, (view.passes + 1) / (view.blocks * steps))
        )
        return dataclasses.replace(choice, besides=jnp.where(view.open & settled[:, None], view.tokens, -1)), memory

    def _smallest(self, guess):
        return jnp.min(jnp.where(guess.masked, _gap(guess), jnp.inf), axis=-1)

    def _wide(self, gap, spent):
        asked = jnp.where(spent < 0.33, self.early, jnp.where(spent < 0.67, self.middle, self.late))
        return gap >= asked


def _gap(guess):
    best = jax.lax.top_k(guess.log_own, 2)[0]
    return best[..., 0] - best[..., 1]
