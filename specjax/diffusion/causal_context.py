"""Diffusion of a model of both kinds: causal passes read known tokens, and each block is denoised by passes that see all of
it (Nemotron-Labs-Diffusion, `generate`)."""

import dataclasses

import jax.numpy as jnp

from specjax.diffusion.block import BlockDiffusion
from specjax.lm import Block, Wants


@dataclasses.dataclass(frozen=True)
class CausalContext(BlockDiffusion):
    """A `BlockDiffusion` whose known tokens are read causally, as the same model decodes autoregressively.

    Blocks are counted from the prompt's end. A row's pass does one of two things:

    - It reads the known tokens that are not in the cache, the prompt's last one or a finished block, causally. It stores
      them and commits the token after them, the next block's seed, which is the autoregressive mode's likeliest.
    - It reads the active block, every token of which sees the cache and all of the block. The output at a position is
      for that position, and nothing is stored.

    A block is read whole, as in training: positions after a text's end hold masks. A schedule is for the positions that
    a seed leaves open.
    """

    align: str = "prompt_end"

    @property
    def rounded(self) -> int:
        return 0

    @property
    def _seeds(self) -> bool:
        return True

    def checked(self):
        if self.policy.decoder is not None or self.align != "prompt_end":
            wrong = "align" if self.align != "prompt_end" else f"the policy {type(self.policy).__name__}"
            raise ValueError(
                f"a model of both kinds counts blocks from the prompt's end and reads one per pass: leave {wrong} out"
            )
        return super().checked()

    def _read_prompts(self, params, fresh, prompts, lengths):
        """All of the prompt but its last token, whose pass commits the first seed."""
        size = prompts.shape[1]
        stored = jnp.maximum(fresh.prompt_length - 1, 0)
        at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], prompts.shape)
        block = Block(prompts, at, jnp.zeros_like(stored))
        delta = self.target(params["target"], block, None, wants=Wants()).delta
        slots = jnp.where(at < stored[:, None], at, fresh.tokens.shape[1])
        return dataclasses.replace(fresh, cache=self.target.commit(fresh.cache, delta, None, slots), stored=stored)

    def _read(self, params, state, at, masked):
        storing = self._storing(state, at)
        own = jnp.arange(self.block_length)
        begin = jnp.where(storing, state.stored, at[:, 0])
        read = begin[:, None] + own[None]
        known = read < jnp.minimum(at[:, :1], state.limit[:, None])
        tokens = jnp.take_along_axis(state.tokens, read, axis=1, mode="clip")
        tokens = jnp.where(jnp.where(storing[:, None], known, read < state.limit[:, None]), tokens, self.mask_id)
        # rows that store look back, and what follows their known tokens is not seen by these
        visible = ~storing[:, None, None] | (own[:, None] >= own[None])[None]
        final, delta = self._read_block(params, state.cache, tokens, read, begin, visible)
        last = jnp.maximum(at[:, 0] - begin - 1, 0)[:, None, None]
        seeds = jnp.take_along_axis(final, last, axis=1)
        features = jnp.where((storing[:, None] & (own == 0)[None])[:, :, None], seeds, final)
        writes = known & (storing & ~state.done)[:, None]
        cache = self.target.commit(state.cache, delta, None, jnp.where(writes, read, state.tokens.shape[1]))
        logits = self._possible(state, at, self.target.unembed(params["target"], features))
        stored = jnp.where(storing & ~state.done, at[:, 0], state.stored)
        return (
            logits,
            (at < state.limit[:, None]) & ~storing[:, None],
            dataclasses.replace(state, cache=cache, stored=stored),
        )
