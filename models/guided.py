"""Classifier-free guidance of text (Sanchez et al. 2023, arXiv:2306.17806), as in `transformers`."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants, encodes
from specjax.models.paired import Paired, PairedCache

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Guided(Paired):
    """A model guided away from the text that follows without the prompt.

    The distribution is `other + scale * (own - other)` in log-probabilities.

    The other text begins with the negative prompt or, without one, with the prompt's last token. The new text follows,
    and both texts share it. The other text is read with the same weights and a separate cache. `scale` 1 has no effect;
    use the model itself instead.

    Attributes:
      scale: transformers' `guidance_scale`; below 1 it leans towards the other text.
      negative: token ids, transformers' `negative_prompt_ids`.

    Raises:
      ValueError: if the scale is not finite, or the model has an encoder.
    """

    reads_prompt: ClassVar[bool] = False

    scale: float = 1.0
    negative: tuple[int, ...] = ()

    def __post_init__(self):
        if not math.isfinite(self.scale):
            raise ValueError(f"guidance_scale must be a finite number, got {self.scale!r}")
        if encodes(self.lm):
            raise ValueError(
                "guidance leaves out the prompt, and this model's encoder reads it: decode without guidance"
            )

    def blended(self, own, other):
        return jnp.where(own == -jnp.inf, -jnp.inf, other + self.scale * (own - other))

    def other(self, params):
        return self.lm, params

    @property
    def room(self) -> int:
        return -(-len(self.negative) // 128) * 128  # a size that a mesh can split

    def begin(self, params: PyTree, cache: PairedCache, lengths: Array) -> PairedCache:
        """Reads all but the last token of the negative prompt into the other cache.

        Its last token takes the place of the prompt's last token."""
        count = max(len(self.negative), 1) - 1
        cache = dataclasses.replace(cache, shift=lengths - 1 - count)
        if not count:
            return cache
        rows = lengths.shape[0]
        tokens = jnp.asarray(self.negative[:-1], jnp.int32)[None]
        block = Block(tokens, jnp.arange(count, dtype=jnp.int32)[None], jnp.zeros((1,), jnp.int32))
        empty = self.lm.init_cache(1, count, jax.tree.leaves(cache.own)[0].dtype)
        delta = self.lm(params, block, empty, wants=Wants()).delta
        delta = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), delta)
        first, counts = jnp.zeros((rows,), jnp.int32), jnp.full((rows,), count, jnp.int32)
        other = self.lm.commit(cache.other, delta, None, first, counts)
        return dataclasses.replace(cache, other=other)

    def elsewhere(self, block: Block, cache: PairedCache | None) -> Block:
        if cache is None:
            return block
        shift = cache.shift
        tokens = block.tokens
        if self.negative:
            last = shift + len(self.negative) - 1  # the prompt's last token
            tokens = jnp.where(block.positions == last[:, None], self.negative[-1], tokens)
        positions = jnp.maximum(block.positions - shift[:, None], 0)
        length = jnp.clip(block.length - shift, 0, None)
        return dataclasses.replace(block, tokens=tokens, positions=positions, length=length, split=False)
