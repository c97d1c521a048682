"""How far a compressed model is from the whole one, on text: the fitness of EvoPress.

In the shape descriptions `B` denotes rows, `T` their tokens, `V` the vocabulary, `L` layers and `N` rows of the text.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import LM
from specjax.objectives.base import Batch
from specjax.train.data import Rows, stacked
from specjax.train.evopress.population import Candidate, Cut
from specjax.warpers.lists import rounded

Array = jax.Array
Kind = Literal["kl", "sparse_kl", "perplexity"]
KINDS = ("kl", "sparse_kl", "perplexity")
Compress = Callable[[Candidate], tuple[Any, Array]]
"""The parameters of a candidate, and the sublayers `[L, 2]` bool that it leaves out."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A fitness, averaged over the tokens that the text is to predict; those of a sequence's last place predict nothing.

    Attributes:
      lm: the model.
      params: of the whole model.
      compress: makes a candidate's model.
      rows: the text.
      kind: `kl`, KL(whole, candidate) in nats; `sparse_kl`, the same over the whole model's likeliest tokens alone;
        `perplexity`, of the text.
      top: how many tokens `sparse_kl` compares.
      batch: the most rows of a pass.
    """

    lm: LM
    params: Any
    compress: Compress
    rows: Rows
    kind: Kind = "kl"
    top: int = 10
    batch: int = 8

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"unknown fitness {self.kind!r}; choose {', '.join(KINDS)}")
        if not 1 < self.top <= self.lm.vocab_size:
            raise ValueError(f"sparse_kl compares from 2 to all {self.lm.vocab_size} tokens, not {self.top}")

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The tokens of every row, up to the last that is to be predicted."""
        mask = np.asarray(self.rows.mask)
        return (mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)).tolist()

    def __call__(self, candidates: Sequence[Candidate], chosen: Sequence[Cut]) -> list[float]:
        """See `specjax.train.evopress.population.Fitness`; `inf` for a candidate whose numbers are not finite."""
        totals, counts = [[] for _ in candidates], []
        width = min(rounded(max(size for _, size in chosen)), np.asarray(self.rows.tokens).shape[1])
        height = min(self.batch, 1 << (len(chosen) - 1).bit_length())  # so that few heights are compiled
        for begin in range(0, len(chosen), height):
            batch = self._batch(chosen[begin : begin + height], height, width)
            reference = None if self.kind == "perplexity" else _whole(self.lm, self.params, batch)
            for i, candidate in enumerate(candidates):
                params, skip = self.compress(candidate)
                totals[i].append(_total(self.lm, params, skip, batch, reference, self.kind, self.top))
            counts.append(batch.due(1).sum())
        totals, counts = jax.device_get((totals, counts))  # once, so that no pass waits for the host
        means = np.asarray(totals, np.float64).sum(axis=1) / max(sum(map(int, counts)), 1)
        found = np.exp(means) if self.kind == "perplexity" else means
        return [float(own) if math.isfinite(own) else math.inf for own in found]

    def _batch(self, chosen: Sequence[Cut], height: int, width: int) -> Batch:
        indices = np.asarray([i for i, _ in chosen] + [len(self.rows)] * (height - len(chosen)))
        arrays = {name: own[:, :width].copy() for name, own in stacked(self.rows, indices).items()}
        for row, (_, size) in enumerate(chosen):
            arrays["mask"][row, size:] = False
        return Batch.placed(arrays, None)


def logits(lm: LM, params: Any, skip: Array | None, batch: Batch) -> Array:
    """`[B, T, V]` float32 of a model without the sublayers `skip` `[L, 2]`."""
    block = batch.block()
    h = lm.embed(params, block.tokens)
    h, _ = lm.layers(params, h, 0, lm.num_layers, block, None, None, skip)
    return lm.unembed(params, lm.norm(params, h))


@functools.partial(jax.jit, static_argnums=0)
def _whole(lm: LM, params: Any, batch: Batch) -> Array:
    return logits(lm, params, None, batch)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _total(lm: LM, params: Any, skip: Array, batch: Batch, reference: Array | None, kind: Kind, top: int) -> Array:
    own = logits(lm, params, skip, batch)[:, :-1]
    if reference is None:
        each = -jnp.take_along_axis(jax.nn.log_softmax(own), batch.tokens[:, 1:, None], axis=2)[..., 0]
    else:
        each = divergence(reference[:, :-1], own, top if kind == "sparse_kl" else None)
    return jnp.where(batch.due(1), each, 0.0).sum()


def divergence(whole: Array, own: Array, top: int | None = None) -> Array:
    """KL divergences of distributions from those of the whole model.

    Args:
      whole: its logits, `[..., V]`.
      own: the other logits.
      top: compares the distributions over so many of the whole model's likeliest tokens; None: over all.

    Returns:
      `[...]`, in nats.
    """
    if top is not None:
        whole, ids = jax.lax.top_k(whole, top)
        own = jnp.take_along_axis(own, ids, axis=-1)
    p, q = jax.nn.log_softmax(whole), jax.nn.log_softmax(own)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)
