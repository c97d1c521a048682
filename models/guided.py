"""Classifier-free guidance of text (Sanchez et al. 2023, arXiv:2306.17806), as in `transformers`, and by another model
(Kornblith et al. 2023, arXiv:2307.16686)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants, encodes
from specjax.models.paired import Paired, PairedCache

Array = jax.Array
PyTree = Any

LEAST = -1e4
"""The log-probability that a guide's impossible token counts with, so that scores stay finite."""


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
        if encodes(self.other_lm):
            raise ValueError(
                "guidance leaves out the prompt, and this model's encoder reads it: decode without guidance, or by another "
                "model without an encoder"
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
        lm, weights = self.other(params)
        empty = lm.init_cache(1, count, jax.tree.leaves(cache.other)[0].dtype)
        delta = lm(weights, block, empty, wants=Wants()).delta
        delta = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), delta)
        first, counts = jnp.zeros((rows,), jnp.int32), jnp.full((rows,), count, jnp.int32)
        other = lm.commit(cache.other, delta, None, first, counts)
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


@dataclasses.dataclass(frozen=True)
class GuidedBy(Guided):
    """A model guided away from what another one says of the new text, without the prompt.

    The distribution is proportional to `own ** scale / other ** away`, and no token is cut. The other model reads the
    text that `Guided` describes, and has the same vocabulary. It has no encoder; the model may have one, whose source
    is then the condition, such as the picture of a caption. Parameters are {`lm`, `guide`}.

    Attributes:
      guide: the other model.
      away: the other model's weight; None: `scale - 1`, as in `Guided`.

    Raises:
      ValueError: see `Guided`; without another model, for a weight that is negative or not finite, or if the
        vocabularies differ in size.
    """

    guide: Any = None
    away: float | None = None

    def __post_init__(self):
        if self.guide is None:
            raise ValueError("guidance by another model needs that model: give guide")
        super().__post_init__()
        if self.away is not None and not (self.away >= 0 and math.isfinite(self.away)):
            raise ValueError(f"away of guidance must be a finite number >= 0, got {self.away!r}")
        if self.guide.vocab_size != self.lm.vocab_size:
            sizes = f"{self.guide.vocab_size} tokens and the model {self.lm.vocab_size}"
            raise ValueError(f"the guide has {sizes}: take one of the same vocabulary")

    def blended(self, own, other):
        away = self.scale - 1 if self.away is None else self.away
        return jnp.where(own == -jnp.inf, -jnp.inf, self.scale * own - away * jnp.maximum(other, LEAST))

    def other(self, params):
        return self.guide, params["guide"]

    def own(self, params):
        return params["lm"]

    @property
    def other_lm(self):
        return self.guide

    def encode(self, params, cache, source):
        """See `specjax.lm.LM.encode`: the model alone reads the source."""
        return dataclasses.replace(cache, own=self.lm.encode(self.own(params), cache.own, source))

    def axes(self, params):
        return {"lm": self.lm.axes(params["lm"]), "guide": self.guide.axes(params["guide"])}
