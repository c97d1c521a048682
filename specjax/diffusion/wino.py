"""WINO: commits at a low threshold, and reopens tokens that a second look finds unlikely (Hong et al. 2025, arXiv:2507.18578).

The second look needs no separate pass: a shadow of the active block follows the canvas, with masks at the same
positions. A shadow sees all of the canvas except its own twin, and nothing in the canvas sees a shadow.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.common import at_least_one, widened
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.unmask.base import Choice, Guess, Unmask, confidence, ranks
from specjax.lm import Block, Wants

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Review(Guess):
    """A guess with a second look.

    Attributes:
      again: `[B, W]` float32, the probability of every known token of the block when that token is hidden.
    """

    again: Any = None


@dataclasses.dataclass(frozen=True)
class Wino(Unmask):
    """Commits the surest above `threshold`, at most a share of the open positions, and reopens committed tokens below `back`.

    Fewer are reopened than the previous pass committed, so a block takes at most as many passes as it has positions.

    Attributes:
      threshold: tau.
      back: tau_back; 0 reopens nothing.
      share: the share of the open positions that one pass may commit; the number is kept between `fewest` and `most`.
      fewest: see `share`.
      most: see `share`.
    """

    about = About("wino", "commits boldly, opens what a second look doubts; no cache", "arXiv:2507.18578", "lossy")

    threshold: float = 0.6
    back: float = 0.9
    share: float = 0.7
    fewest: int = 5
    most: int = 20

    def __post_init__(self):
        if not (self.threshold >= 0 and self.back >= 0 and 0 < self.share <= 1 and 1 <= self.fewest <= self.most):
            raise ValueError(f"wino needs threshold and back >= 0, share in (0, 1] and 1 <= fewest <= most, got {self}")

    @property
    def revises(self):
        return True

    @property
    def decoder(self):
        return WinoDecoder

    def init(self, batch, width, vocab_size):
        """How many tokens of the block were known before the last pass wrote any, without those that it opened `[B]`."""
        return jnp.zeros((batch,), jnp.int32)

    def __call__(self, guess: Review, memory):
        score = confidence(guess)
        sure = guess.masked & (score > self.threshold)
        left = guess.masked.sum(axis=1)
        cap = jnp.clip(jnp.floor(self.share * left + 1e-4).astype(jnp.int32), self.fewest, self.most)
        commit = at_least_one(ranks(score, sure) < cap[:, None], score, guess.masked)
        count = commit.sum(axis=1)
        doubted = guess.committed & (guess.again < self.back) & (count > 1)[:, None]
        known = guess.committed.sum(axis=1)
        again = doubted & (ranks(-guess.again, doubted) < (known - memory - 1)[:, None])
        return Choice(commit, score, guess.tokens, again), (known - again.sum(axis=1)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class WinoDecoder(DiffusionDecoder):
    """A `DiffusionDecoder` whose policy is `Wino`."""

    policy: Wino = Wino()

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError("wino takes neither a cache nor guidance yet: choose the cache none and cfg_scale 0")
        if self.shift:
            raise ValueError(
                "wino hides a token from its own position, and this model's output at position i - 1 is for position i "
                "(Dream's shift): choose another policy"
            )
        return super().checked()

    def _predict(self, params, state, at, masked):
        batch, size = state.tokens.shape
        width = self.block_length
        everywhere = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (batch, size))
        real = everywhere < state.limit[:, None]
        of_shadows = at < state.limit[:, None]
        canvas = jnp.concatenate([real, jnp.zeros((batch, width), bool)], axis=1)
        twin = at[:, :, None] == everywhere[:, None, :]
        shadow = jnp.concatenate(
            [real[:, None] & ~twin, jnp.broadcast_to(of_shadows[:, None], (batch, width, width))], axis=2
        )
        block = Block(
            jnp.concatenate([state.tokens, jnp.full((batch, width), self.mask_id)], axis=1),
            jnp.concatenate([everywhere, at], axis=1),
            jnp.zeros_like(state.limit),
            jnp.concatenate([jnp.broadcast_to(canvas[:, None], (batch, size, size + width)), shadow], axis=1),
            causal=False,
        )
        with jax.named_scope("target"):
            final = self.target(params["target"], block, None, wants=Wants(final=True)).final
            own = jnp.take_along_axis(final, at[:, :, None], axis=1, mode="clip")
            logits = self._possible(state, at, self.target.unembed(params["target"], own))
            hidden = self.target.unembed(params["target"], final[:, size:])
            hidden = jnp.where(logits > -jnp.inf, hidden, -jnp.inf)
        guess = self._guess(state, at, masked, logits)
        known = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        dist = jax.nn.log_softmax(hidden, axis=-1)
        again = jnp.exp(jnp.take_along_axis(dist, known[:, :, None], axis=2, mode="clip")[:, :, 0])
        return widened(Review, guess, again=again), state
