"""Block diffusion: a model that sees all of its own block and of the blocks before it, and nothing after (SDAR,
arXiv:2510.06303; Fast-dLLM v2, arXiv:2509.26328).

The inputs of a finished block never change, so its cache is exact. A pass reads one block. One more pass over a
finished block stores it, because the earlier passes saw masks in it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoder import Decoder
from specjax.diffusion.common import block_of, check_whole_blocks, widened
from specjax.diffusion.decoder import DiffusionDecoder
from specjax.diffusion.state import DiffusionState
from specjax.lm import Block, Wants
from specjax.sampling.sampler import best

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState(DiffusionState):
    """A `DiffusionState` with an exact prefix.

    Attributes:
      stored: `[B]` int32, how many positions the cache holds: whole blocks.
      cut: `[B]` int32, where the text ends; for a policy that fills the last block, `limit` is where that block ends.
    """

    stored: Any = None
    cut: Any = None


@dataclasses.dataclass(frozen=True)
class BlockDiffusion(DiffusionDecoder):
    """A `DiffusionDecoder` for models whose blocks do not see later ones.

    A step is a pass over one block per row: the active one, or a finished one that is not in the cache yet. Stored
    blocks never change, so there is no cache policy to choose.

    By default blocks begin at multiples of W, wherever the prompt ends (SDAR, TraDo, LLaDA 2, Fast-dLLM v2). The last
    block is read whole. Positions after a text's end stay masked, or are filled and cut if the policy `fills`. A
    schedule is for whole blocks, however much of one the prompt fills. If a model's logits are shifted, the pass that
    stores a block commits the next block's first token, its seed. The seed is the likeliest token, also in rows that
    draw.

    Alternatively blocks are counted from the prompt's end (A2D), so that the prompt's first block may be partial. Then
    the last one is as long as the rest of the text. A schedule is for the open positions and rounded pass by pass, and
    there are no seeds: with shifted logits, the token before a block is read with it.

    Attributes:
      sub_block: the length of a block's parts, if it divides the block. Parts are finished from left to right, and the
        policy treats each as a block. 0 for none.
      align: where blocks are counted from: `text` or `prompt_end`.
    """

    sub_block: int = 0
    align: str = "text"

    @property
    def fills_in(self) -> bool:
        return False

    @property
    def slack(self) -> int:
        """See `Decoder.slack`: a last block may be filled beyond the text's end."""
        return self.block_length - 1 if self._fills else 0

    @property
    def strict(self) -> bool:
        return not self._from_prompt

    @property
    def rounded(self) -> int:
        return self.block_length if self._from_prompt else 0

    @property
    def _from_prompt(self) -> bool:
        return self.align == "prompt_end"

    @property
    def _fills(self) -> bool:
        return self.policy.fills and not self._from_prompt

    @property
    def _seeds(self) -> bool:
        return self.shift and not self._from_prompt

    def buffer(self, needed: int) -> int:
        return Decoder.buffer(self, needed)

    def checked(self):
        if self.cache.keeps or self.cfg_scale:
            raise ValueError(
                "a block-diffusion model keeps an exact cache of finished blocks: choose the cache none, and cfg_scale 0"
            )
        if self.policy.decoder is not None and self.policy.block_decoder is None:
            raise ValueError(f"{type(self.policy).__name__} reads whole canvases, and a block-diffusion model does not")
        if self.policy.opens:
            raise ValueError(
                f"{type(self.policy).__name__} opens blocks ahead, and a pass of a block-diffusion model reads one block: "
                "choose another policy"
            )
        if self.sub_block < 0 or (self.sub_block and self.block_length % self.sub_block):
            raise ValueError(f"sub_block {self.sub_block} must divide the block length {self.block_length}")
        if self.align not in ("text", "prompt_end"):
            raise ValueError(f"align must be text or prompt_end, got {self.align!r}")
        check_whole_blocks(self.target, 0 if self._from_prompt else self.block_length)
        return super().checked()

    def _limited(self, state, limit):
        filled = -(-limit // self.block_length) * self.block_length if self._fills else limit
        return dataclasses.replace(state, limit=filled, cut=limit)

    def _end(self, state):
        return state.cut

    def _empty(self, params, batch, capacity, cache_dtype, eos_width) -> BlockState:
        bare = super()._empty(params, batch, capacity, cache_dtype, eos_width)
        zeros = lambda: jnp.zeros((batch,), jnp.int32)
        return widened(BlockState, bare, stored=zeros(), cut=zeros())

    def _init_cache(self, params, batch, capacity, dtype):
        weights = params["target"]
        return self.target.init_cache(batch, capacity, jax.tree.leaves(weights)[0].dtype if dtype is None else dtype)

    def _read_prompts(self, params, fresh, prompts, lengths):
        """The prompt's whole blocks, in one pass; with seeds all but the last, because its pass may commit a seed."""
        count, size = prompts.shape
        first = fresh.prompt_length
        before = -first % self.block_length if self._from_prompt else jnp.zeros_like(first)
        whole = (first + before) // self.block_length - self._seeds
        stored = jnp.maximum(whole * self.block_length - before, 0)
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (count, size))
        real = at < stored[:, None]
        of = (at + before[:, None]) // self.block_length
        visible = (of[:, None, :] <= of[:, :, None]) & real[:, None, :]
        visible = visible | jnp.eye(size, dtype=bool)[None]
        _, delta = self._read_block(params, None, prompts, at, jnp.zeros_like(first), visible)
        cache = self.target.commit(fresh.cache, delta, None, jnp.where(real, at, fresh.tokens.shape[1]))
        return dataclasses.replace(fresh, cache=cache, stored=stored)

    def _read_block(self, params, cache, tokens, at, length, visible=None):
        """Features `[B, T, E]` of tokens after `length` stored positions, and their keys and values."""
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
        if self._from_prompt:
            return super()._start(state)
        return state.reached // self.block_length * self.block_length

    def _entry(self, state):
        if self._from_prompt:
            return super()._entry(state)
        return jnp.full_like(state.reached, self.sub_block or self.block_length)

    def _view(self, state, at):
        return at

    def _blocks(self, state):
        if self._from_prompt:
            return super()._blocks(state)
        return -(-state.limit // self.block_length) - state.prompt_length // self.block_length

    def _warp(self, dist, state):
        """Greedy rows are not filtered, as in the samplers of LLaDA 2 and Fast-dLLM v2."""
        return jnp.where((state.sampling.temperature > 0)[:, None, None], super()._warp(dist, state), dist)

    def _guess(self, state, at, masked, logits):
        guess = super()._guess(state, at, masked, logits)
        if not self._seeds:
            return guess
        seed = jnp.arange(at.shape[1])[None] == 0
        return dataclasses.replace(guess, tokens=jnp.where(seed, best(logits), guess.tokens))

    @property
    def _lasts(self):
        return False

    def _storing(self, state, at):
        return state.stored < at[:, 0]

    def _seeded(self, state, masked, commit):
        return jnp.where(masked[:, :1], masked, commit) if self._seeds else commit

    def _write(self, state, at, masked, commit, choice, working):
        seeding = masked[:, 0] & self._seeds
        return super()._write(state, at, masked, commit, choice, working & ~seeding)

    def _commit(self, state, at, masked, commit, choice, memory, failed):
        """A pass that read a full block and changed nothing of it has stored it too."""
        after: Any = super()._commit(state, at, masked, commit, choice, memory, failed)
        if not self.policy.edits or self._seeds:
            return after
        same = ~(self._storing(state, at) | masked.any(axis=1) | after.fresh.any(axis=1)) & (
            after.reached > state.reached
        )
        return dataclasses.replace(after, stored=jnp.where(same, at[:, 0] + self.block_length, after.stored))

    def _active(self, state):
        """A pass commits at least one token, or stores a finished block and commits the seed."""
        at, masked = self._masked(state)
        seed = masked & self._seeds & (jnp.arange(self.block_length)[None] == 0)
        return at, jnp.where((state.stored < at[:, 0])[:, None] | (seed[:, :1]), seed, masked) & ~state.done[:, None]

    def _read(self, params, state, at, masked):
        storing = self._storing(state, at)
        final, _, new = self._read_blocks(params, state, at, state.tokens[:, None])
        features = final[:, 0, : self.block_length]
        if self._seeds:
            features = jnp.concatenate([features[:, -1:], features[:, :-1]], axis=1)  # the first position is the seed's
        logits = self._possible(state, at, self.target.unembed(params["target"], features))
        return logits, (at < state.limit[:, None]) & ~storing[:, None], new

    def _read_blocks(self, params, state, at, canvases, several=True):
        """Features `[B, K, N, E]` of a block of canvases `[B, K, L]`, their first positions `[B]`, and the state after
        that pass.

        The block is the active one or the one to be stored; with shifted logits and no seeds, the token before it is
        read too. Unless `several`, only the first canvas counts.
        """
        count, capacity = canvases.shape[1:]
        ahead = int(self.shift and not self._seeds)
        storing = self._storing(state, at)
        begin = jnp.where(storing, state.stored, at[:, 0])
        read = begin[:, None] - ahead + jnp.arange(ahead + self.block_length)[None]
        real = read < state.limit[:, None]
        # a block is read whole, as in training: there are masks after the limit too
        blocks = jax.vmap(block_of, in_axes=(1, None), out_axes=1)(canvases, read)
        blocks = jnp.where(real[:, None], blocks, self.mask_id)

        def reading(count):
            place = jnp.tile(read, (1, count))
            of, slot = jnp.divmod(jnp.arange(place.shape[1]), read.shape[1])
            own = slot >= ahead  # the token before the block is in the cache, and sees nothing else
            visible = None if count == 1 else jnp.broadcast_to(of[:, None] == of[None], (*place.shape, place.shape[1]))
            if self._from_prompt:  # a last block ends with the text
                ends = own[None] & jnp.tile(real, (1, count))
                visible = ((of[:, None] == of[None]) & own[:, None])[None] & ends[:, None]
            tokens = blocks[:, :count].reshape(place.shape)
            final, delta = self._read_block(params, state.cache, tokens, place, begin, visible)
            # entries of an unfinished block lie after `stored`, so they are written again before they are read
            write = jnp.tile(real & ~state.done[:, None], (1, count)) & ((of == 0) & own)[None]
            cache = self.target.commit(state.cache, delta, None, jnp.where(write, place, capacity))
            final = final.reshape(*blocks[:, :count].shape, -1)
            return jnp.pad(final, ((0, 0), (0, blocks.shape[1] - count), (0, 0), (0, 0))), cache

        if count == 1:
            final, cache = reading(1)
        else:
            final, cache = jax.lax.cond(several, lambda: reading(count), lambda: reading(1))
        stored = jnp.where(storing & ~state.done, state.stored + self.block_length, state.stored)
        return final, begin - ahead, dataclasses.replace(state, cache=cache, stored=stored)
