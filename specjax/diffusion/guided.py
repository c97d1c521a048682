"""Guided diffusion: an autoregressive model decides how many of a diffusion model's predictions are accepted (FlashDLM,
arXiv:2505.21467).

The diffusion model predicts all open positions of the canvas. The guide reads them once, from left to right, and those
before the first that it does not accept are committed. The guide never writes: if it does not accept the first one,
that is committed all the same.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.common import block_of, widened
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.state import DiffusionState
from specjax.diffusion.unmask.base import Choice, Guess, Unmask
from specjax.lm import LM, Block, Wants

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Supervised(Guess):
    """A guess that a guide has read. If the guide's logits are not finite, no token is predicted.

    Attributes:
      agreed: `[B]` int32, how many of the canvas's open positions are accepted, from the left; at least 1.
    """

    agreed: Any = None


@dataclasses.dataclass(frozen=True)
class Guided(Unmask):
    """Commits the predictions that the guide accepts, from left to right, all over the canvas. Its parameters are
    `params["guide"]`.

    `rule` decides what the guide accepts:

    - `top`: its `top` likeliest tokens;
    - `threshold`: tokens with more than that probability;
    - `relative`: those of its `top` likeliest tokens that have at least that share of the likeliest one's probability.

    Attributes:
      guide: an autoregressive model of the same vocabulary.
      top: how many of the guide's likeliest tokens count; 1 is its own choice.
      rule: `top`, `threshold` or `relative`.
      threshold: for the rule of that name.
      relative: for the rule of that name.
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
    rule: str = "top"
    threshold: float = 0.1
    relative: float = 0.5

    def __post_init__(self):
        if self.top < 1:
            raise ValueError(f"guided needs top >= 1, got {self.top}")
        if self.rule not in ("top", "threshold", "relative"):
            raise ValueError(f"guided needs a rule of top, threshold, relative, got {self.rule!r}")
        if not (self.threshold >= 0 and self.relative >= 0):
            raise ValueError(f"guided needs threshold >= 0 and relative >= 0, got {self.threshold}, {self.relative}")

    @property
    def decoder(self):
        return GuidedDecoder

    @property
    def needs(self):
        return ("guide",)

    @property
    def whole(self):
        return True

    def accepts(self, logits: Array, tokens: Array) -> Array:
        """Which tokens `[B, W]` the guide's logits `[B, W, V]` accept."""
        dist = jax.nn.softmax(logits, axis=-1)
        own = jnp.take_along_axis(dist, tokens[:, :, None], axis=2)
        if self.rule == "threshold":
            return own[:, :, 0] > self.threshold
        among = jnp.sum(dist > own, axis=2) < self.top
        return among & (own[:, :, 0] >= self.relative * dist.max(axis=2)) if self.rule == "relative" else among

    def __call__(self, guess: Supervised, memory):
        view = guess.overview
        accepted = view.open & (jnp.cumsum(view.open, axis=1) <= guess.agreed[:, None])
        commit = guess.masked & (jnp.cumsum(guess.masked, axis=1) <= guess.agreed[:, None])
        first = -jnp.cumsum(guess.masked, axis=1).astype(jnp.float32)
        return Choice(commit, first, guess.tokens, besides=jnp.where(accepted, view.tokens, -1)), memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuidedState(DiffusionState):
    """A `DiffusionState` with the guide's cache.

    Attributes:
      guide: the cache of all known tokens before the first open position, except the last of them.
    """

    guide: Any = None


@dataclasses.dataclass(frozen=True)
class GuidedDecoder(DiffusionDecoder):
    """A `DiffusionDecoder` whose policy is `Guided`. It only completes: nothing may be known after the prompt."""

    @property
    def fills_in(self) -> bool:
        return False

    def checked(self):
        if not isinstance(self.policy, Guided):
            raise ValueError("a GuidedDecoder needs the policy Guided")
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
        """See `DiffusionDecoder.axes`."""
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
        """A pass of the model, and of the guide, whose cache takes in the tokens that will be committed.

        The guide reads part by part, as long as it accepts all of a part.
        """
        guess, state = super()._predict(params, state, at, masked)
        state: Any = state
        policy, view = cast(Guided, self.policy), guess.overview
        capacity, slots = state.tokens.shape[1], jnp.arange(self.block_length, dtype=jnp.int32)[None]
        filled = jnp.where(view.open, view.tokens, state.tokens)
        # the first position that is not drafted, because a cache may leave the last ones out
        end = jnp.min(jnp.where((view.at >= state.length[:, None]) & ~view.open, view.at, capacity), axis=1)

        def part(carry):
            cache, known, reading, broken = carry
            root = known - 1
            read = root[:, None] + slots
            block = Block(block_of(filled, read), read, root)
            output = self.guide(params["guide"], block, cache, wants=Wants(logits=True))
            real = (read + 1 < end[:, None]) & reading[:, None]
            same = policy.accepts(output.logits, block_of(filled, read + 1)) & real
            agreed = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1)
            agreed = jnp.where(reading & (known == state.length), jnp.maximum(agreed, 1), agreed)
            write = (slots < agreed[:, None]) & reading[:, None]
            cache = self.guide.commit(cache, output.delta, None, jnp.where(write, read, capacity))
            broken = broken | jnp.any(real & ~jnp.isfinite(output.logits.max(axis=2)), axis=1)
            known = known + agreed
            return cache, known, reading & same.all(axis=1) & (known < end), broken

        start = state.guide, state.length, ~state.done, jnp.zeros_like(state.done)
        with jax.named_scope("guide"):
            cache, known, _, broken = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), part, start)
        guess = dataclasses.replace(guess, tokens=jnp.where(broken[:, None], -1, guess.tokens))
        return widened(Supervised, guess, agreed=known - state.length), dataclasses.replace(state, guide=cache)
