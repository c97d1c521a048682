"""Log-probabilities of every token of given texts, read in batches of similar lengths. Nothing is decoded.

Shapes: `B` rows, `W` buffer columns, `C` columns of a chunk, `V` vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specjax.lm import LM, Block, Source, Wants
from specjax.settings import settled
from specjax.sharding.ambient import on_mesh
from specjax.sharding.distributed import to_devices, to_host
from specjax.sharding.rules import constrain, partition, rounded

Array = jax.Array

CHUNK = 64
"""Columns read at a time; never more logits than these exist at once."""
WINDOW = 64
"""Batches per window: texts of a window are sorted by length together, and results follow after each window."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to read.

    Attributes:
      ids: token ids.
      first: the index of the first token to score, at least 1.
      source: what the model's encoder reads: token ids, or features `[S, F]`; None without an encoder.
    """

    ids: tuple[int, ...]
    first: int = 1
    source: Any = None


class Readable(Protocol):
    """What a reader asks of a text; see `Text`."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def first(self) -> int: ...

    @property
    def source(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Found:
    """The log-probabilities of a text's tokens from `first` on.

    Attributes:
      logprobs: natural logarithms under the model's own softmax, one per token.
      greedy: whether each of these tokens is the likeliest.
    """

    logprobs: list[float]
    greedy: bool


@dataclasses.dataclass(frozen=True)
class Reading:
    """The program: teacher-forced log-probabilities of rows, chunk by chunk through a cache. Static and hashable.

    Attributes:
      lm: the model.
      mesh: the mesh that holds parameters and rows, or None.
    """

    lm: LM
    mesh: jax.sharding.Mesh | None

    @settled
    @on_mesh
    def __call__(
        self, params: Any, tokens: Array, first: Array, length: Array, source: Source | None = None
    ) -> tuple[Array, Array]:
        """The log-probabilities of tokens `first` to `length - 1` of every row.

        Args:
          params: the model's.
          tokens: `[B, W + 1]` int32, right-padded with -1; W is a multiple of `CHUNK`.
          first: `[B]` int32, at least 1; W + 1 for a row with nothing to score.
          length: `[B]` int32, tokens of a row.
          source: what an encoder reads, or None.

        Returns:
          Log-probabilities `[B, W]` float32, column j for token j + 1, and whether that token is the likeliest. Other
          columns are undefined.
        """
        rows, width = tokens.shape[0], tokens.shape[1] - 1
        dtype = jax.tree.leaves(params)[0].dtype
        size = max(width, source.inputs.shape[1]) if source is not None and source.is_tokens else width
        cache = self.lm.init_cache(rows, rounded(self.mesh, "slots", size), dtype)
        if source is not None:
            cache = self.lm.encode(params, cache, source)

        def read(i, cache, wants):
            start = i * CHUNK
            part = jax.lax.dynamic_slice_in_dim(tokens, start, CHUNK, 1)
            positions = jnp.broadcast_to(start + jnp.arange(CHUNK, dtype=jnp.int32)[None], part.shape)
            begin = jnp.full((rows,), start, jnp.int32)
            output = self.lm(params, Block(part, positions, begin), cache, wants=wants)
            cache = self.lm.commit(cache, output.delta, None, begin, jnp.full((rows,), CHUNK, jnp.int32))
            return constrain(self.mesh, self.lm.cache_axes(cache), cache), output.logits

        def score(i, carry):
            cache, found, likeliest = carry
            cache, logits = read(i, cache, Wants(logits=True))
            after = jax.lax.dynamic_slice_in_dim(tokens, i * CHUNK + 1, CHUNK, 1)
            own = jnp.take_along_axis(logits, jnp.maximum(after, 0)[:, :, None], axis=2)[:, :, 0]
            own = own - jax.nn.logsumexp(logits, axis=2)
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, i * CHUNK, 1)
            return cache, write(found, own), write(likeliest, jnp.argmax(logits, axis=2) == after)

        scored, end = (jnp.min(first) - 1) // CHUNK, -(-(jnp.max(length) - 1) // CHUNK)
        cache = jax.lax.fori_loop(0, scored, lambda i, cache: read(i, cache, Wants())[0], cache)  # prompts only
        empty = jnp.zeros((rows, width), jnp.float32), jnp.zeros((rows, width), bool)
        return jax.lax.fori_loop(scored, end, score, (cache, *empty))[1:]


score_program = jax.jit(Reading.__call__, static_argnums=0)
"""`Reading`, compiled once per model, mesh, number of rows and width."""


class Reader:
    """Reads texts with an autoregressive model.

    Args:
      model: a `specjax.models.Model`.
      params: the model's own.
      mesh: the mesh that holds them, or None.

    Raises:
      ValueError: for a diffusion model.
    """

    def __init__(self, model: Any, params: Any, mesh: jax.sharding.Mesh | None = None):
        if model.masked:
            raise ValueError(
                f"{model.name} is {model.kind}, which gives a text no log-probabilities token by token: ask an "
                "autoregressive model for them"
            )
        self.reading, self.params = Reading(model.lm, mesh), params

    def run(self, texts: Sequence[Readable], *, batch_size: int = 8, start: int = 0) -> Iterator[Found]:
        """Yields the results in the order of the texts. They depend on the batch only by rounding.

        Args:
          texts: all of them.
          batch_size: rows read together; fewer if there are fewer texts.
          start: the first text to read. Batches are the same as in a run from the beginning.
        """
        rows = rounded(self.reading.mesh, "batch", min(batch_size, power_of_two(len(texts))))
        size = WINDOW * rows
        for begin in range(start // size * size, len(texts), size):
            window = texts[begin : begin + size]
            order = sorted(range(len(window)), key=lambda i: -len(window[i].ids))  # for batches of similar lengths
            found: dict[int, Found] = {}
            for at in range(0, len(order), rows):
                some = order[at : at + rows]
                found.update(zip(some, self._batch([window[i] for i in some], rows), strict=True))
            yield from (found[i] for i in range(max(start - begin, 0), len(window)))

    def _batch(self, texts: Sequence[Readable], rows: int) -> list[Found]:
        width = max(CHUNK, power_of_two(max(len(text.ids) for text in texts) - 1))
        tokens = np.full((rows, width + 1), -1, np.int32)
        first, length = np.full(rows, width + 1, np.int32), np.zeros(rows, np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text.ids)] = text.ids
            first[row], length[row] = text.first, len(text.ids)
        source = self._sources(texts, rows)
        arrays = jax.tree.map(self._placed, (tokens, first, length, *([] if source is None else [source])))
        logprobs, likeliest = to_host(score_program(self.reading, self.params, *arrays))
        own = [slice(text.first - 1, len(text.ids) - 1) for text in texts]
        return [Found(logprobs[i, part].tolist(), bool(likeliest[i, part].all())) for i, part in enumerate(own)]

    def _sources(self, texts, rows) -> Source | None:
        """The sources of a batch; empty rows repeat the first."""
        if texts[0].source is None:
            return None
        every = [text.source for text in (*texts, *texts[:1] * (rows - len(texts)))]
        return Source.of(every, power_of_two(max(map(len, every))) if isinstance(every[0], tuple) else 0)

    def _placed(self, x: np.ndarray) -> Array:
        mesh = self.reading.mesh
        if mesh is None:
            return jax.device_put(x)
        axes = ("batch", *[None] * (x.ndim - 1))
        return to_devices(x, NamedSharding(mesh, partition(mesh, axes, x.shape, {})))


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least this number."""
    return 1 << max(least - 1, 0).bit_length()
