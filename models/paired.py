"""A target whose distribution combines two passes: the model's own, and another over another text or by another
model."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.lm import LM, Block, Source, Wants, answered
from specjax.pretty import Pretty

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedCache(Pretty):
    """Both caches.

    Attributes:
      own: the model's.
      other: the other pass's.
      shift: `[B]` int32, how many places the other text lags: position p of the model is position p - shift there.
    """

    own: PyTree
    other: PyTree
    shift: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairedDelta(Pretty):
    """The deltas of both passes; `other` is None if there was no other pass."""

    own: PyTree
    other: PyTree


@dataclasses.dataclass(frozen=True)
class Paired(abc.ABC):
    """An LM around another: its logits are `blended` from two passes, each with its own cache.

    Drafters and verifiers see one target. A node's distribution depends only on the text and the path to the node, so
    every drafter keeps the text of plain decoding. Layers, features and the head, which drafters may also read, are
    those of the model's own pass. A step reads the weights of both passes.

    Attributes:
      lm: the model.

    Class attributes:
      reads_prompt: whether the other text begins with the prompt. If not, a pass without logits runs the model only.
    """

    reads_prompt: ClassVar[bool] = True

    lm: LM

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    @property
    def reads_mixtures(self) -> bool:
        """Whether both passes do; each embeds tokens by its own table."""
        return self.lm.reads_mixtures and self.other_lm.reads_mixtures

    @abc.abstractmethod
    def blended(self, own: Array, other: Array) -> Array:
        """Scores `[B, T, V]` float32 from the log-probabilities of both passes."""

    @abc.abstractmethod
    def other(self, params: PyTree) -> tuple[LM, PyTree]:
        """The model of the other pass, and its parameters."""

    def own(self, params: PyTree) -> PyTree:
        """The model's own parameters."""
        return params

    def elsewhere(self, block: Block, cache: PairedCache) -> Block:
        """The block as the other pass reads it."""
        return block

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        if past is not None and wants.head:
            raise ValueError(
                f"{type(self).__name__} reads a tree in one pass: take a drafter that does not grow one with it"
            )
        mine, theirs = (None, None) if cache is None else (cache.own, cache.other)
        body = dataclasses.replace(wants, logits=wants.head, topk=0, draw=False)
        output = self.lm(self.own(params), block, mine, wants=body, past=past, partial=partial)
        if not wants.head and not self.reads_prompt:
            return dataclasses.replace(output, delta=PairedDelta(output.delta, None))
        lm, weights = self.other(params)
        said = lm(weights, self.elsewhere(block, cache), theirs, wants=Wants(logits=wants.head))
        output = dataclasses.replace(output, delta=PairedDelta(output.delta, said.delta))
        if not wants.head:
            return output
        scores = self.blended(*(jax.nn.log_softmax(logits, axis=-1) for logits in (output.logits, said.logits)))
        return answered(output, scores, wants, draw)

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> PairedCache:
        """Empty caches for both passes."""
        return PairedCache(
            self.lm.init_cache(batch, capacity, dtype),
            self.other_lm.init_cache(batch, capacity + self.room, dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    @property
    def other_lm(self) -> LM:
        """The model of the other pass."""
        return self.lm

    @property
    def room(self) -> int:
        """The number of further slots that the other text may need."""
        return 0

    def encode(self, params: PyTree, cache: PairedCache, source: Source) -> PairedCache:
        """See `specjax.lm.LM.encode`: both passes read the source."""
        lm, weights = self.other(params)
        own = self.lm.encode(self.own(params), cache.own, source)
        return dataclasses.replace(cache, own=own, other=lm.encode(weights, cache.other, source))

    def source(self, cache: PairedCache) -> Array | None:
        """See `specjax.lm.LM.source`."""
        return self.lm.source(cache.own)

    def reading(self, cache: PairedCache, capacity: int) -> PairedCache:
        """See `specjax.lm.LM.reading`."""
        return cache

    def begin(self, params: PyTree, cache: PairedCache, lengths: Array) -> PairedCache:
        """See `specjax.lm.LM.begin`."""
        return cache

    def commit(
        self, cache: PyTree, delta: PyTree, src: Array | None, dst: Array, counts: Array | None = None
    ) -> PyTree:
        """See `specjax.lm.LM.commit`. A cache of the model's own kind, which a drafter may keep, is committed by the
        model."""
        if not isinstance(cache, PairedCache):
            return self.lm.commit(cache, delta, src, dst, counts)
        own = self.lm.commit(cache.own, delta.own, src, dst, counts)
        if delta.other is None:
            return dataclasses.replace(cache, own=own)
        there = dst - (cache.shift if dst.ndim == 1 else cache.shift[:, None])
        other = self.other_lm.commit(cache.other, delta.other, src, there, counts)
        return dataclasses.replace(cache, own=own, other=other)

    def states(self, cache: PairedCache) -> tuple[PyTree, PyTree]:
        """See `specjax.lm.LM.states`."""
        return self.lm.states(cache.own), self.other_lm.states(cache.other)

    def with_states(self, cache: PairedCache, states: tuple[PyTree, PyTree]) -> PairedCache:
        """See `specjax.lm.LM.with_states`."""
        own, other = self.lm.with_states(cache.own, states[0]), self.other_lm.with_states(cache.other, states[1])
        return dataclasses.replace(cache, own=own, other=other)

    def cache_axes(self, cache: PyTree) -> PyTree:
        """See `specjax.lm.LM.cache_axes` and `commit`."""
        if not isinstance(cache, PairedCache):
            return self.lm.cache_axes(cache)
        return PairedCache(self.lm.cache_axes(cache.own), self.other_lm.cache_axes(cache.other), ("batch",))

    def embed(self, params, tokens):
        return self.lm.embed(self.own(params), tokens)

    def layers(self, params, h, lo, hi, block, cache, past=None, skip=None, below=None):
        own = None if cache is None else cache.own
        return self.lm.layers(self.own(params), h, lo, hi, block, own, past, skip, below)

    def norm(self, params, h):
        return self.lm.norm(self.own(params), h)

    def unembed(self, params, h):
        return self.lm.unembed(self.own(params), h)
