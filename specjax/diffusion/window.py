"""A window of masks that slides over a text that is read causally (WeDLM, arXiv:2512.22737; SDLM, arXiv:2509.24007).

Masks stand after all known tokens, whatever their positions, and a known token sees only known ones before it. So the
keys and values of the text before the window are final, and a plain causal cache of it is exact.

In the shape descriptions `B` denotes rows, `L` the canvas, `W` the window.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoder import Decoder
from specjax.diffusion.common import block_of, widened
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.state import DiffusionState
from specjax.lm import Block, Wants

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowState(DiffusionState):
    """A `DiffusionState` with an exact prefix.

    Attributes:
      stored: `[B]` int32, how many positions the cache holds; all from there to the window's first are known.
    """

    stored: Any = None


@dataclasses.dataclass(frozen=True)
class WindowDiffusion(DiffusionDecoder):
    """A `DiffusionDecoder` for models that read known tokens causally, and masks after them.

    The active block is W positions from the first open one on. A pass reads a window of W tokens, and stores the known
    ones before it that earlier passes filled. It commits what the policy chooses, and the window moves on to the first
    position that is still open. Keys and values never change once stored, so there is no cache policy to choose.

    A mask's logits are for its own position, and it sees known tokens and the masks before it (WeDLM). With `shift` the
    window begins with the last known token, and logits are for the next position. All of the window then see each other
    (SDLM), and it is as long at a text's end.
    """

    @property
    def fills_in(self) -> bool:
        return False

    def buffer(self, needed: int) -> int:
        return Decoder.buffer(self, needed)

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError(
                "a model with causal attention keeps an exact cache: choose the cache none, and guidance 0"
            )
        if not self.policy.slides:
            raise ValueError(
                f"{type(self.policy).__name__} decides over more than one pass or one block, and here a window slides in every "
                "pass: choose another policy, such as entropy, and no steps"
            )
        return super().checked()

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> WindowState:
        bare = super()._empty(params, batch, capacity, cache_dtype, eos_width)
        return widened(WindowState, bare, stored=jnp.zeros((batch,), jnp.int32))

    def _init_cache(self, params, batch, capacity, dtype):
        weights = params["target"]
        return self.target.init_cache(batch, capacity, jax.tree.leaves(weights)[0].dtype if dtype is None else dtype)

    def _read_prompts(self, params, fresh, prompts, lengths):
        """What stands before the first open position, in one causal pass."""
        count, size = prompts.shape
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (count, size))
        known = jnp.maximum(fresh.prompt_length - self.shift, 0)
        real = at < known[:, None]
        block = Block(prompts, at, jnp.zeros_like(lengths))
        delta = self.target(params["target"], block, None, wants=Wants()).delta
        cache = self.target.commit(fresh.cache, delta, None, jnp.where(real, at, fresh.tokens.shape[1]))
        return dataclasses.replace(fresh, cache=cache, stored=known)

    def _start(self, state):
        return state.reached

    def _view(self, state, at):
        return at

    def _read(self, params, state, at, masked):
        width, capacity = self.span, state.tokens.shape[1]
        first = state.reached - self.shift
        read = state.stored[:, None] + jnp.arange(2 * width, dtype=jnp.int32)[None]
        there = read < (first + width)[:, None]
        if not self.shift:
            there = there & (read < state.limit[:, None])
        tokens = jnp.where(read < state.limit[:, None], block_of(state.tokens, read), self.mask_id)
        masks, place = tokens == self.mask_id, jnp.arange(2 * width)
        earlier = (place[:, None] >= place[None])[None]
        inside = (read >= first[:, None]) if self.shift else masks
        # of the window, a token sees all before it, and of the others those that it is to see; text sees text before it
        visible = jnp.where(inside[:, None], inside[:, :, None] & (earlier | self.shift), inside[:, :, None] | earlier)
        block = Block(tokens, read, state.stored, visible & there[:, None], causal=False)
        output = self.target(params["target"], block, state.cache, wants=Wants(final=True))
        slots = (at - self.shift - read[:, :1])[:, :, None]
        features = jnp.take_along_axis(output.final, slots, axis=1, mode="clip")
        final = (read < first[:, None]) & ~state.done[:, None]
        cache = self.target.commit(state.cache, output.delta, None, jnp.where(final, read, capacity))
        stored = jnp.where(state.done, state.stored, first)
        logits = self._possible(state, at, self.target.unembed(params["target"], features))
        return logits, at < state.limit[:, None], dataclasses.replace(state, cache=cache, stored=stored)
