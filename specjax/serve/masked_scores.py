"""Log-probabilities of texts under a masked-diffusion model: a bound by masking a part of the text at random, as LLaDA's
`get_log_likelihood` (arXiv:2502.09992, appendix B.5; ML-GSAI/LLaDA).

A text of `l` tokens after a prompt has

    bound = -1/l sum_r (l / r) mean over masks M of r tokens of sum_{i in M} -log p(x_i | tokens outside M),

which is at most its log-probability, and equal to it for one token. With few tokens every mask is read, and the bound is
exact. With more of them it is the mean over drawn masks. A model with blocks has the sum of such bounds, each given the
blocks before.

Shapes: `W` columns of a canvas, `N` masks, `B` of them read together, `V` vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import LM, Block, Wants
from specjax.serve.score import Pair, Score, Scorer
from specjax.serve.text_reader import CHUNK, power_of_two
from specjax.settings import settled
from specjax.sharding.ambient import on_mesh
from specjax.sharding.distributed import to_host

Array = jax.Array

SAMPLES = 128
"""Masks of a text, as in LLaDA's evaluation."""
STRATA = 16
"""Masks whose sizes are spread evenly over a text's tokens: the batch of LLaDA's evaluation."""


@dataclasses.dataclass(frozen=True)
class MaskedReading:
    """The program: the summed log-probabilities of masked tokens, mask by mask. Static and hashable.

    Attributes:
      lm: the model.
      mesh: the mesh that holds its parameters, or None.
      mask_id: the id of an open position.
      shift: whether the output at position i - 1 is for position i.
      block: the length of the model's blocks; 0: it sees the whole canvas.
      cfg_scale: of guidance, see `specjax.diffusion.DiffusionDecoder`.
    """

    lm: LM
    mesh: jax.sharding.Mesh | None
    mask_id: int
    shift: bool
    block: int
    cfg_scale: float

    @settled
    @on_mesh
    def __call__(
        self, params: Any, tokens: Array, first: Array, end: Array, seen: Array, skew: Array, masks: Array, count: Array
    ) -> Array:
        """Sums `[N, B]` float32 of the log-probabilities of masked tokens.

        Args:
          params: the model's.
          tokens: `[W]` int32, `mask_id` from `end` on.
          first: `[]` int32, the first position that may be masked, at least 1.
          end: `[]` int32, the end of those that may be masked.
          seen: `[]` int32, how many positions the model sees.
          skew: `[]` int32, by how much blocks are shifted: position i belongs to block (i + skew) // `block`.
          masks: `[N, B, W]` bool.
          count: `[]` int32, how many of the N are read; the sums of others are 0.
        """
        rows, width = masks.shape[1:]
        at = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (rows, width))
        sees = (at < seen)[:, None, :]
        if self.block:
            of = (at + skew) // self.block
            sees = sees & (of[:, None, :] <= of[:, :, None])

        def features(canvas):
            block = Block(canvas, at, jnp.zeros((rows,), jnp.int32), sees, causal=False)
            final = self.lm(params, block, None, wants=Wants(final=True)).final
            return jnp.roll(final, 1, axis=1) if self.shift else final

        def read(i, found):
            masked = masks[i]
            known = features(jnp.where(masked, self.mask_id, tokens[None]))
            blind = known
            if self.cfg_scale:
                prompt = at < first
                blind = features(jnp.where(masked | prompt, self.mask_id, tokens[None]))

            def chunk(j, total):
                # the last chunk is moved back to the canvas's end, and counts no column twice
                begin = first + j * CHUNK
                start = jnp.minimum(begin, width - size)
                part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1)
                logits = self.lm.unembed(params, part(known))
                if self.cfg_scale:
                    without = self.lm.unembed(params, part(blind))
                    logits = without + (1 + self.cfg_scale) * (logits - without)
                own = jax.lax.dynamic_slice_in_dim(tokens, start, size)[None, :, None]
                own = jnp.take_along_axis(logits, jnp.broadcast_to(own, (rows, size, 1)), axis=2)[:, :, 0]
                counts = part(masked) & (part(at) >= begin)
                return total + jnp.where(counts, own - jax.nn.logsumexp(logits, axis=2), 0).sum(axis=1)

            size = min(CHUNK, width)
            chunks = -(-(end - first) // CHUNK)
            return found.at[i].set(jax.lax.fori_loop(0, chunks, chunk, jnp.zeros((rows,), jnp.float32)))

        return jax.lax.fori_loop(0, count, read, jnp.zeros(masks.shape[:2], jnp.float32))


bound_program = jax.jit(MaskedReading.__call__, static_argnums=0)
"""`MaskedReading`, compiled once per model, mesh, number of masks read together and width."""


class MaskedScorer(Scorer):
    """Scores pairs with the diffusion model of an engine: bounds of log-probabilities.

    Args:
      engine: has a masked-diffusion model.
      samples: masks of a text. A text whose masks are no more than that has its bound without an error.

    Raises:
      ValueError: for another model, or no samples.
    """

    def __init__(self, engine: Any, samples: int = SAMPLES):
        model = engine.model
        if model.masked is None or model.canvas is not None:
            raise ValueError(f"{model.name} has no masks: samples are for masked-diffusion models")
        if model.masked.causal_context:
            raise ValueError(
                f"{model.name} is a model of both kinds, whose autoregressive mode has exact scores: leave decode and samples "
                "out"
            )
        if samples < 1:
            raise ValueError(f"a text needs at least one mask, got samples={samples}")
        own, decoder = model.masked, engine.decoder
        self.engine, self.samples = engine, samples
        self.from_prompt = own.block > 0 and decoder.align == "prompt_end"
        self.reading = MaskedReading(
            model.lm, engine.mesh, own.mask_id, decoder.shift, own.block, float(decoder.cfg_scale)
        )

    def run(self, pairs: Sequence[Pair], *, batch_size: int = 8, start: int = 0) -> Iterator[Score]:
        """Yields scores in the order of the pairs. Texts of equal lengths have equal masks, so that answers to one question
        are compared by the same ones.

        Args:
          pairs: from `pair`.
          batch_size: masks read together.
          start: the first pair to score.
        """
        for pair in pairs[start:]:
            parts = [self._part(pair, *span, batch_size) for span in self._spans(pair)]
            total, variance = math.fsum(value for value, _ in parts), math.fsum(error for _, error in parts)
            yield Score(
                pair.prompt,
                pair.continuation,
                total,
                [],
                list(pair.ids[pair.first :]),
                False,
                id=pair.id,
                line=pair.line,
                standard_error=math.sqrt(variance),
            )

    def _spans(self, pair: Pair) -> Iterator[tuple[int, int]]:
        """The continuation in parts, each with the end of what a pass sees: all of it, or what each block has of it."""
        end, block = len(pair.ids), self.reading.block
        if not block:
            yield pair.first, end
            return
        skew, begin = self._skew(pair), pair.first
        while begin < end:
            after = ((begin + skew) // block + 1) * block - skew
            yield begin, min(after, end)
            begin = after

    def _skew(self, pair: Pair) -> int:
        """By how much blocks are shifted."""
        return -pair.first % self.reading.block if self.from_prompt else 0

    def _part(self, pair: Pair, first: int, end: int, batch_size: int) -> tuple[float, float]:
        """The bound of the tokens from `first` to `end`, and the variance of the estimate."""
        block, skew = self.reading.block, self._skew(pair) if self.reading.block else 0
        # a block that counts from the text's beginning is read whole, with masks after the text's end
        seen = end if not block or self.from_prompt else -(-end // block) * block
        width = power_of_two(max(seen, CHUNK))
        chosen, weights, groups = masks_of(end - first, self.samples)
        rows = min(batch_size, power_of_two(len(chosen)))
        count = -(-len(chosen) // rows)
        masks = np.zeros((power_of_two(count), rows, width), bool)
        masks.reshape(-1, width)[: len(chosen), first:end] = chosen
        tokens = np.full(width, self.reading.mask_id, np.int32)
        tokens[:end] = pair.ids[:end]
        numbers = (np.int32(number) for number in (first, end, seen, skew))
        arrays = jax.device_put((tokens, *numbers, masks, np.int32(count)))
        sums = to_host(bound_program(self.reading, self.engine.params["target"], *arrays)).reshape(-1)[: len(chosen)]
        values = weights * sums.astype(np.float64)
        if groups == 1:
            return math.fsum(values), 0.0
        means = values.reshape(groups, -1).sum(axis=1) * groups
        return float(means.mean()), float(means.var(ddof=1) / groups)


def masks_of(length: int, samples: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Masks `[N, length]` of a text, their weights `[N]`, and in how many groups of equal size they were drawn.

    All masks there are, if these are no more than `samples`; that is one group. Otherwise groups of `STRATA` drawn ones (or
    of as many as there are samples), whose sizes are spread evenly from a size that is drawn for the group. What is drawn
    depends on the numbers alone.

    Args:
      length: of the text.
      samples: rounded up to whole groups, of which there are two at least.

    >>> masks, weights, _ = masks_of(2, 3)
    >>> masks.astype(int).tolist(), weights.tolist()
    ([[1, 0], [0, 1], [1, 1]], [0.5, 0.5, 0.5])
    >>> sizes(3, 4, 2).tolist(), sizes(5, 4, 3).tolist()
    ([2, 3, 1, 1], [3, 4, 1, 2])
    """
    if (1 << length) - 1 <= samples:
        subsets = [s for r in range(1, length + 1) for s in itertools.combinations(range(length), r)]
        masks = np.zeros((len(subsets), length), bool)
        for row, subset in enumerate(subsets):
            masks[row, list(subset)] = True
        return masks, np.asarray([1 / (len(s) * math.comb(length, len(s))) for s in subsets]), 1
    group = min(STRATA, -(-samples // 2))
    groups = max(-(-samples // group), 2)
    masks, counts = np.zeros((groups * group, length), bool), []
    for at in range(groups):
        draw = np.random.Generator(np.random.Philox(at))
        counts += sizes(length, group, 1 + int(draw.random() * length)).tolist()
        # token by token: a longer text draws the same numbers for its first tokens
        ranks = np.argsort(np.argsort(draw.random((length, group)), axis=0), axis=0).T
        own = slice(at * group, (at + 1) * group)
        masks[own] = ranks < np.asarray(counts[own])[:, None]
    return masks, length / (np.asarray(counts, np.float64) * len(masks)), groups


def sizes(length: int, group: int, first: int) -> np.ndarray:
    """How many of `length` tokens each mask of a group has: evenly spread from `first` on, in a circle.

    LLaDA's rule, which rounds halves to even: size j is ((round(first + j length / group) - 1) mod length) + 1.
    """
    return (np.round(first + np.arange(group) * (length / group)).astype(int) - 1) % length + 1
