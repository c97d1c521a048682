"""Block diffusion: a model that sees all of its own block and of the blocks before it, and nothing after (SDAR,
arXiv:2510.06303; Fast-dLLM v2, arXiv:2509.26328).

What a finished block was computed from never changes, so its cache is exact: a pass reads one block, and one more pass over a
finished block stores it, since the passes before saw masks in it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.decoder import Diffusion, DiffusionState, widened
from specjax.lm import Block, Wants
from specjax.sharding.ambient import on_mesh

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState(DiffusionState):
    """A `DiffusionState` with an exact prefix. Blocks begin at multiples of W, wherever the prompt ends.

    Attributes:
      stored: `[B]` int32, how many positions the cache holds: whole blocks.
      anchor: `[B, E]`, the feature of the last of them, from which a shifted model says the next block's first token.
    """

    stored: Any = None
    anchor: Any = None


@dataclasses.dataclass(frozen=True)
class BlockDiffusion(Diffusion):
    """A `Diffusion` decoder for models whose blocks do not see later ones.

    A step is a pass over one block a row: the active one, or a finished one that is not in the cache yet. What is stored never
    changes, so there is no cache policy to choose. The last block is read whole; what lies behind the row's limit stays masked.

    Attributes:
      sub_block: where it divides the block: parts of that length are finished from left to right, and the policy takes each for
        a block of its own; 0 for none.
    """

    sub_block: int = 0

    @property
    def fills_in(self) -> bool:
        return False

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError(
                "a block-diffusion model keeps an exact cache of finished blocks: choose the cache none, and cfg_scale 0"
            )
        if self.policy.decoder is not None:
            raise ValueError(f"{type(self.policy).__name__} reads whole canvases, a block-diffusion model does not")
        if self.sub_block < 0 or (self.sub_block and self.block_length % self.sub_block):
            raise ValueError(f"sub_block {self.sub_block} must divide the block length {self.block_length}")
        return super().checked()

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> BlockState:
        bare = super()._empty(params, batch, capacity, cache_dtype, eos_width)
        feature = jax.eval_shape(self.target.embed, params["target"], bare.tokens[:, :1])
        anchor = jnp.zeros((batch, feature.shape[2]), feature.dtype)
        return widened(BlockState, bare, stored=jnp.zeros((batch,), jnp.int32), anchor=anchor)

    def _init_cache(self, params, batch, capacity, dtype):
        weights = params["target"]
        return self.target.init_cache(batch, capacity, jax.tree.leaves(weights)[0].dtype if dtype is None else dtype)

    def _read_prompts(self, params, fresh, prompts, lengths):
        """The prompt's whole blocks, in one pass."""
        count, size = prompts.shape
        first = fresh.prompt_length
        stored = first // self.block_length * self.block_length
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (count, size))
        real = at < stored[:, None]
        of = at[0] // self.block_length
        visible = (of[None, :] <= of[:, None])[None] & real[:, None, :]
        visible = visible | jnp.eye(size, dtype=bool)[None]
        final, delta = self._read_block(params, None, prompts, at, jnp.zeros_like(first), visible)
        anchor = jnp.take_along_axis(final, jnp.maximum(stored - 1, 0)[:, None, None], axis=1)[:, 0]
        cache = self.target.commit(fresh.cache, delta, None, jnp.where(real, at, fresh.tokens.shape[1]))
        return dataclasses.replace(fresh, cache=cache, stored=stored, anchor=anchor.astype(fresh.anchor.dtype))

    def _read_block(self, params, cache, tokens, at, length, visible=None):
        """Features `[B, T, E]` of tokens behind `length` stored positions, and their keys and values."""
        block = Block(tokens, at, length, visible, causal=False)
        output = self.target(params["target"], block, cache, wants=Wants(final=True))
        return output.final, output.delta

    def _masked(self, state):
        start = state.length // self.block_length * self.block_length
        at = start[:, None] + jnp.arange(self.block_length)[None]
        tokens = jnp.take_along_axis(state.tokens, at, axis=1, mode="clip")
        masked = (tokens == self.mask_id) & (at < state.limit[:, None])
        if self.sub_block:
            part = jnp.arange(self.block_length)[None] // self.sub_block
            masked = masked & (part == jnp.argmax(masked, axis=1)[:, None] // self.sub_block)
        return at, masked

    @on_mesh
    def step(self, params, state):
        """One pass over a block of every row: it commits at least one token, or stores a finished block."""
        at, masked = self._masked(state)
        masked = masked & ~(state.done | (state.stored < at[:, 0]))[:, None]
        return self._advance(params, state, at, masked)

    def _read(self, params, state, at, masked):
        capacity = state.tokens.shape[1]
        storing = state.stored < at[:, 0]
        begin = jnp.where(storing, state.stored, at[:, 0])
        read = begin[:, None] + jnp.arange(self.block_length)[None]
        real = read < state.limit[:, None]
        # a block is read whole, as in training: masks stand behind the limit too
        tokens = jnp.where(real, jnp.take_along_axis(state.tokens, read, axis=1, mode="clip"), self.mask_id)
        final, delta = self._read_block(params, state.cache, tokens, read, begin)
        # what an unfinished block writes lies behind `stored`: it is not read before it is written again
        write = real & ~state.done[:, None]
        cache = self.target.commit(state.cache, delta, None, jnp.where(write, read, capacity))
        features = final
        if self.shift:
            features = jnp.concatenate([state.anchor[:, None].astype(final.dtype), final[:, :-1]], axis=1)
        logits = self._without_mask(self.target.unembed(params["target"], features))
        moved = storing & ~state.done
        stored = jnp.where(moved, state.stored + self.block_length, state.stored)
        anchor = jnp.where(moved[:, None], final[:, -1], state.anchor)
        return logits, dataclasses.replace(state, cache=cache, stored=stored, anchor=anchor)
