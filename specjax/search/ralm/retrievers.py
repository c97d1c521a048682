"""Retrievers: any function from queries to the ids of documents, and three of them: BM25, vectors and a faiss index.

In the shape descriptions `Q` denotes queries, `N` documents, `E` the width of vectors, `C` candidates.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from specjax.settings import settled

Query = str | tuple[int, ...]
"""The end of a text: words, or token ids of a model without a tokenizer."""
Embed = Callable[[Sequence[Query]], Any]
"""From queries to vectors `[Q, E]`."""


class Retriever(Protocol):
    """From queries to documents. The first document of a query depends on neither `k` nor the other queries."""

    def __call__(self, queries: Sequence[Any], k: int, /) -> Sequence[Sequence[int]]:
        """For every query the ids of up to k documents, at least one, the best first."""
        ...


@runtime_checkable
class Ranks(Protocol):
    """A retriever that can also choose among few documents, by the same scores and in the same order among equals."""

    def among(self, queries: Sequence[Any], documents: Sequence[Sequence[int]], /) -> Sequence[int]:
        """For every query the best of its documents."""
        ...


class Bm25:
    """BM25 over words, by the package `bm25s`; of equal scores the smaller id is first.

    Args:
      documents: texts.

    Raises:
      ValueError: without the package; if there are no documents, or one is not a text.
    """

    def __init__(self, documents: Sequence[str]):
        if not len(documents) or not all(isinstance(own, str) for own in documents):
            raise ValueError("BM25 reads words: give documents as texts, at least one, or another retriever")
        try:
            import bm25s
        except ImportError as error:
            raise ValueError("BM25 needs the package bm25s: pip install 'specjax[retrieval]'") from error
        self._tokenize = bm25s.tokenize
        self.index: Any = bm25s.BM25()
        self.count = len(documents)
        self.index.index(self._tokens(documents), show_progress=False)

    def _tokens(self, texts: Sequence[str]) -> Any:
        return self._tokenize(list(texts), return_ids=False, show_progress=False)

    def _known(self, queries):
        return [self.index.get_tokens_ids(words) if words else [] for words in self._tokens(queries)]

    def __call__(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """See `Retriever`."""
        zeros = np.zeros(self.count, np.float32)
        return [
            best(self.index.get_scores_from_ids(known) if len(known) else zeros, k) for known in self._known(queries)
        ]

    def among(self, queries: Sequence[str], documents: Sequence[Sequence[int]]) -> list[int]:
        """See `Ranks`; it adds up the entries of these documents alone, in the index's own order and type."""
        data, indices, starts = (self.index.scores[name] for name in ("data", "indices", "indptr"))
        chosen = []
        for known, ids in zip(self._known(queries), documents, strict=True):
            own = np.unique(ids)
            scores = np.zeros(len(own), data.dtype)
            for token in known:
                column = slice(starts[token], starts[token + 1])
                at = np.minimum(np.searchsorted(indices[column], own), max(column.stop - column.start - 1, 0))
                found = indices[column][at] == own
                scores[found] += data[column][at[found]]
            chosen.append(int(own[np.argmax(scores)]))
        return chosen


def best(scores: np.ndarray, k: int) -> list[int]:
    """The ids of the k highest scores `[N]`; of equal ones the smaller id is first."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)[: k - len(above)]
    ids = np.concatenate([above, equal])
    return ids[np.lexsort((ids, -scores[ids]))].tolist()


@dataclasses.dataclass(frozen=True, eq=False)
class _Vectors(abc.ABC):
    """Documents by the inner product of vectors.

    The nearest `candidates` are found in float32, whose sums differ with the number of queries. Their order is that of
    sums in float64, which do not.
    """

    @property
    @abc.abstractmethod
    def _form(self) -> tuple[int, int]:
        """N and E."""

    @abc.abstractmethod
    def _near(self, asked: np.ndarray, count: int) -> np.ndarray:
        """Ids of the nearest documents `[Q, C]` in any order; -1 is none."""

    @abc.abstractmethod
    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """Vectors `[n, E]` of documents."""

    def __call__(self, queries: Sequence[Query], k: int) -> list[list[int]]:
        """See `Retriever`.

        Raises:
          ValueError: for more documents than candidates, or vectors of another shape.
        """
        most = self.candidates  # type: ignore[attr-defined]
        if k > most:
            raise ValueError(f"{k} documents of {most} candidates: set candidates to {k} or more")
        asked = self._asked(queries)
        near = self._near(asked, min(most, self._form[0]))
        return [self._ranked(query, ids[ids >= 0])[:k].tolist() for query, ids in zip(asked, near, strict=True)]

    def among(self, queries: Sequence[Query], documents: Sequence[Sequence[int]]) -> list[int]:
        """See `Ranks`."""
        asked = self._asked(queries)
        return [int(self._ranked(query, np.asarray(ids))[0]) for query, ids in zip(asked, documents, strict=True)]

    def _asked(self, queries):
        found = np.ascontiguousarray(self.embed(queries), np.float32)  # type: ignore[attr-defined]
        if found.shape != (len(queries), self._form[1]) or not np.isfinite(found).all():
            raise ValueError(f"embed must give finite vectors [{len(queries)}, {self._form[1]}], got {[*found.shape]}")
        return found

    def _ranked(self, query, ids):
        scores = np.sum(self._rows(ids).astype(np.float64) * query.astype(np.float64), axis=1)
        return ids[np.lexsort((ids, -scores))]


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(_Vectors):
    """The documents with the largest inner product, exactly, by a matrix of vectors on the device.

    Queries are padded to a power of two, so that few programs are compiled.

    Attributes:
      vectors: `[N, E]` float32.
      embed: from queries to vectors `[Q, E]`.
      candidates: see `_Vectors`.

    Raises:
      ValueError: if the vectors are not a matrix.
    """

    vectors: np.ndarray
    embed: Embed
    candidates: int = 64

    def __post_init__(self):
        if np.ndim(self.vectors) != 2 or not len(self.vectors):
            raise ValueError(f"vectors must be a matrix [N, E], got {[*np.shape(self.vectors)]}")

    @property
    def _form(self):
        return np.shape(self.vectors)

    @functools.cached_property
    def _table(self):
        return jax.device_put(np.asarray(self.vectors, np.float32))

    def _near(self, asked, count):
        padded = np.zeros((1 << (len(asked) - 1).bit_length(), asked.shape[1]), np.float32)
        padded[: len(asked)] = asked
        return jax.device_get(_nearest(count, self._table, jax.device_put(padded)))[: len(asked)]

    def _rows(self, ids):
        return np.asarray(self.vectors)[ids]


@functools.partial(jax.jit, static_argnums=0)
@settled
def _nearest(count: int, vectors: jax.Array, asked: jax.Array) -> jax.Array:
    """The ids `[Q, C]` of the largest products."""
    scores = jax.lax.dot_general(asked, vectors, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return jax.lax.top_k(scores, count)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Faiss(_Vectors):
    """The documents that an index of `faiss` finds, by inner product.

    Attributes:
      index: such as `faiss.IndexFlatIP`; it must be able to `reconstruct` vectors.
      embed: from queries to vectors `[Q, E]`.
      candidates: how many are asked for, whatever k is; an approximate index then finds the same first one for any k.
    """

    index: Any
    embed: Embed
    candidates: int = 64

    @property
    def _form(self):
        return self.index.ntotal, self.index.d

    def _near(self, asked, count):
        return self.index.search(asked, count)[1]

    def _rows(self, ids):
        return self.index.reconstruct_batch(np.asarray(ids, np.int64))
