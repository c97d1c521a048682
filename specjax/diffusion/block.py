"""Block diffusion: a model that sees all of its own block and of the blocks before it, and nothing after (SDAR,
arXiv:2510.06303; Fast-dLLM v2, arXiv:2509.26328).

What a finished block was computed from never changes, so its cache is exact: a pass reads one block, and one more pass over a
finished block stores it, since the passes before saw masks in it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.common import block_of, widened
from specjax.diffusion.decoder import Diffusion, DiffusionState
from specjax.lm import Block, Wants

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState(DiffusionState):
    """A `DiffusionState` with an exact prefix. Blocks begin at multiples of W, wherever the prompt ends.

    Attributes:
      stored: `[B]` int32, how many positions the cache holds: whole blocks.
    """

    stored: Any = None


@dataclasses.dataclass(frozen=True)
class BlockDiffusion(Diffusion):
    """A `Diffusion` decoder for models whose blocks do not see later ones.

    A step is a pass over one block a row: the active one, or a finished one that is not in the cache yet. What is stored never
    changes, so there is no cache policy to choose. The last block is read whole; what lies behind the row's limit stays masked.
    A schedule is for whole blocks, however much of one the prompt fills. Of a model whose logits are shifted, the pass that
    stores a block commits the next one's first token, its seed.

    Attributes:
      sub_block: where it divides the block: parts of that length are finished from left to right, and the policy takes each for
        a block of its own; 0 for none.
    """

    sub_block: int = 0

    @property
    def fills_in(self) -> bool:
        return False

    @property
    def grain(self) -> int:
        return 128

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError(
                "a block-diffusion model keeps an exact cache of finished blocks: choose the cache none, and cfg_scale 0"
            )
        if self.policy.decoder is not None and self.policy.block_decoder is None:
            raise ValueError(f"{type(self.policy).__name__} reads whole canvases, a block-diffusion model does not")
        if self.sub_block < 0 or (self.sub_block and self.block_length % self.sub_block):
            raise ValueError(f"sub_block {self.sub_block} must divide the block length {self.block_length}")
        return super().checked()

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> BlockState:
        bare = super()._empty(params, batch, capacity, cache_dtype, eos_width)
        return widened(BlockState, bare, stored=jnp.zeros((batch,), jnp.int32))

    def _init_cache(self, params, batch, capacity, dtype):
        weights = params["target"]
        return self.target.init_cache(batch, capacity, jax.tree.leaves(weights)[0].dtype if dtype is None else dtype)

    def _read_prompts(self, params, fresh, prompts, lengths):
        """The prompt's whole blocks, in one pass; where blocks begin with a seed, all but the last: its pass may commit one."""
        count, size = prompts.shape
        first = fresh.prompt_length
        stored = jnp.maximum(first // self.block_length - self.shift, 0) * self.block_length
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (count, size))
        real = at < stored[:, None]
        of = at[0] // self.block_length
        visible = (of[None, :] <= of[:, None])[None] & real[:, None, :]
        visible = visible | jnp.eye(size, dtype=bool)[None]
        _, delta = self._read_block(params, None, prompts, at, jnp.zeros_like(first), visible)
        cache = self.target.commit(fresh.cache, delta, None, jnp.where(real, at, fresh.tokens.shape[1]))
        return dataclasses.replace(fresh, cache=cache, stored=stored)

    def _read_block(self, params, cache, tokens, at, length, visible=None):
        """Features `[B, T, E]` of tokens behind `length` stored positions, and their keys and values."""
        block = Block(tokens, at, length, visible, causal=False)
        output = self.target(params["target"], block, cache, wants=Wants(final=True))
        return output.final, output.delta

    def _masked(self, state):
        at, masked = super()._masked(state)
        if self.sub_block:
            part = jnp.arange(self.block_length)[None] // self.sub_block
            masked = masked & (part == jnp.argmax(masked, axis=1)[:, None] // self.sub_block)
        return at, masked

    def _start(self, state):
        return state.reached // self.block_length * self.block_length

    def _entry(self, state):
        return jnp.full_like(state.reached, self.sub_block or self.block_length)

    def _view(self, state, at):
        return at

    def _blocks(self, state):
        return -(-state.limit // self.block_length) - state.prompt_length // self.block_length

    @property
    def _lasts(self):
        return False

    def _storing(self, state, at):
        return state.stored < at[:, 0]

    def _seeded(self, state, masked, commit):
        return jnp.where(masked[:, :1], masked, commit) if self.shift else commit

    def _write(self, state, at, masked, commit, choice, working):
        seeding = masked[:, 0] & self.shift
        return super()._write(state, at, masked, commit, choice, working & ~seeding)

    def _active(self, state):
        """A pass commits a token or more, or stores a finished block and commits the seed."""
        at, masked = self._masked(state)
        seed = masked & self.shift & (jnp.arange(self.block_length)[None] == 0)
        return at, jnp.where((state.stored < at[:, 0])[:, None] | (seed[:, :1]), seed, masked) & ~state.done[:, None]

    def _read(self, params, state, at, masked):
        final, first, new = self._read_blocks(params, state, at, state.tokens[:, None])
        features = final[:, 0]
        if self.shift:
            features = jnp.concatenate([features[:, -1:], features[:, :-1]], axis=1)  # the first one is the seed's
        logits = self._possible(self.target.unembed(params["target"], features))
        storing = first < at[:, 0]
        return logits, (at < state.limit[:, None]) & ~storing[:, None], new

    def _read_blocks(self, params, state, at, canvases, several=True):
        """Features `[B, K, W, E]` of a block of canvases `[B, K, L]`, where it begins `[B]`, and the state after that pass: the
        active block, or the one that is to be stored. Where not `several`, only the first canvas counts."""
        count, capacity = canvases.shape[1:]
        storing = state.stored < at[:, 0]
        begin = jnp.where(storing, state.stored, at[:, 0])
        read = begin[:, None] + jnp.arange(self.block_length)[None]
        real = read < state.limit[:, None]
        # a block is read whole, as in training: masks stand behind the limit too
        blocks = jax.vmap(block_of, in_axes=(1, None), out_axes=1)(canvases, read)
        blocks = jnp.where(real[:, None], blocks, self.mask_id)

        def reading(count):
            place = jnp.tile(read, (1, count))
            of = jnp.arange(place.shape[1]) // self.block_length
            visible = None if count == 1 else jnp.broadcast_to(of[:, None] == of[None], (*place.shape, place.shape[1]))
            tokens = blocks[:, :count].reshape(place.shape)
            final, delta = self._read_block(params, state.cache, tokens, place, begin, visible)
            # what an unfinished block writes lies behind `stored`: it is not read before it is written again
            write = jnp.tile(real & ~state.done[:, None], (1, count)) & (of == 0)[None]
            cache = self.target.commit(state.cache, delta, None, jnp.where(write, place, capacity))
            final = final.reshape(*blocks[:, :count].shape, -1)
            return jnp.pad(final, ((0, 0), (0, blocks.shape[1] - count), (0, 0), (0, 0))), cache

        if count == 1:
            final, cache = reading(1)
        else:
            final, cache = jax.lax.cond(several, lambda: reading(count), lambda: reading(1))
        stored = jnp.where(storing & ~state.done, state.stored + self.block_length, state.stored)
        return final, begin, dataclasses.replace(state, cache=cache, stored=stored)
