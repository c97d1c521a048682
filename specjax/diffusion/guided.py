"""Guided diffusion: an autoregressive model says how far a diffusion model's predictions hold (FlashDLM, arXiv:2505.21467).

The diffusion model predicts the open positions of its block; the guide reads them once, from left to right, and as many are
committed as it would have said itself. It never writes: where it agrees with none, the first one is committed all the same.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.common import widened
from specjax.diffusion.decoder import Diffusion, DiffusionState
from specjax.diffusion.unmask.base import Choice, Guess, Unmask, confidence
from specjax.lm import LM, Block, Wants

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Supervised(Guess):
    """A guess that a guide has read. Where the guide's logits are not finite, no token is predicted.

    Attributes:
      agreed: `[B]` int32, how many of the open positions hold what the guide says too, from the left; at least 1.
    """

    agreed: Any = None


@dataclasses.dataclass(frozen=True)
class Guided(Unmask):
    """Commits from left to right what the guide agrees with. Its parameters are `params["guide"]`.

    Attributes:
      guide: an autoregressive model of the same vocabulary.
      top: how many of the guide's likeliest tokens count as agreement; 1 is its own choice.
    """

    about = About(
        "guided",
        "what an autoregressive model would have said too, from left to right",
        "arXiv:2505.21467",
        "lossy",
        loads="guide",
    )

    guide: LM
    top: int = 1

    def __post_init__(self):
        if self.top < 1:
            raise ValueError(f"guided needs top >= 1, got {self.top}")

    @property
    def decoder(self):
        return GuidedDecoder

    @property
    def needs(self):
        return ("guide",)

    def __call__(self, guess: Supervised, memory):
        held = jnp.cumsum(guess.masked, axis=1) <= guess.agreed[:, None]
        return Choice(guess.masked & held, confidence(guess), guess.tokens), memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuidedState(DiffusionState):
    """A `DiffusionState` with the guide's cache.

    Attributes:
      guide: of all known tokens before the first open position but the last of them.
    """

    guide: Any = None


@dataclasses.dataclass(frozen=True)
class GuidedDecoder(Diffusion):
    """A `Diffusion` decoder whose policy is `Guided`. It only completes: nothing may be known behind the prompt."""

    @property
    def fills_in(self) -> bool:
        return False

    def checked(self):
        if not isinstance(self.policy, Guided):
            raise ValueError("a GuidedDecoder's policy is Guided")
        if self.policy.guide.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"the guide has {self.policy.guide.vocab_size} tokens and the model {self.target.vocab_size}: they must share "
                "one vocabulary"
            )
        if self.policy.top > self.target.vocab_size:
            raise ValueError(f"top {self.policy.top} is more than the {self.target.vocab_size} tokens there are")
        return super().checked()

    @property
    def guide(self) -> LM:
        return cast(Guided, self.policy).guide

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> GuidedState:
        bare = super()._empty(params, batch, capacity, cache_dtype, eos_width)
        dtype = jax.tree.leaves(params["guide"])[0].dtype if cache_dtype is None else cache_dtype
        return widened(GuidedState, bare, guide=self.guide.init_cache(batch, capacity, dtype))

    def axes(self, state):
        """See `Diffusion.axes`."""
        axes: Any = super().axes(state)
        return dataclasses.replace(axes, guide=self.guide.cache_axes(state.guide))

    def _read_prompts(self, params, fresh, prompts, lengths):
        """The guide reads the prompt in one pass."""
        count, size = prompts.shape
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (count, size))
        block = Block(prompts, at, jnp.zeros_like(lengths))
        delta = self.guide(params["guide"], block, None, wants=Wants()).delta
        known = jnp.where(at < lengths[:, None] - 1, at, fresh.tokens.shape[1])
        return dataclasses.replace(fresh, guide=self.guide.commit(fresh.guide, delta, None, known))

    def _predict(self, params, state, at, masked):
        """A pass of each model. The guide's cache takes in what will be committed."""
        guess, state = super()._predict(params, state, at, masked)
        state: Any = state
        capacity, width, top = state.tokens.shape[1], self.block_length, cast(Guided, self.policy).top
        root = state.length - 1
        # the open positions are the block's last ones: they are moved to its front
        slots = jnp.arange(width, dtype=jnp.int32)[None]
        first = jnp.argmax(masked, axis=1)[:, None]
        drafts = jnp.take_along_axis(guess.tokens, jnp.minimum(first + slots, width - 1), axis=1)
        real = slots < masked.sum(axis=1)[:, None]
        before = jnp.take_along_axis(state.tokens, root[:, None], axis=1, mode="clip")
        tokens, read = jnp.concatenate([before, drafts[:, :-1]], axis=1), root[:, None] + slots
        with jax.named_scope("guide"):
            output = self.guide(params["guide"], Block(tokens, read, root), state.guide, wants=Wants(topk=top))
        values, ids = output.topk
        same = jnp.any(ids == drafts[:, :, None], axis=2) & real
        agreed = jnp.maximum(jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1), 1)
        write = (slots < agreed[:, None]) & ~state.done[:, None]
        cache = self.guide.commit(state.guide, output.delta, None, jnp.where(write, read, capacity))
        broken = jnp.any(real & ~jnp.isfinite(values[:, :, 0]), axis=1)[:, None]
        guess = dataclasses.replace(guess, tokens=jnp.where(broken, -1, guess.tokens))
        return widened(Supervised, guess, agreed=agreed), dataclasses.replace(state, guide=cache)
