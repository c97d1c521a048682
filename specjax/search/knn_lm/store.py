"""Hidden states of a text, each with the token that follows it.

In the shape descriptions `N` denotes entries, `E` the model width, `Q` queries, `T` tokens that are read together.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants
from specjax.search.ralm.retrievers import Dense
from specjax.settings import settled
from specjax.sharding.distributed import to_host

WINDOW = 256
"""Tokens of a text that are read together when entries are made; each window is read on its own."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """A text as entries, in its order.

    Attributes:
      vectors: `[N, E]` float32, the hidden state at each token: the last layer's output after the final norm.
      tokens: `[N]` int32, the token after each.

    Raises:
      ValueError: for other shapes, vectors that are not finite, or no entries.
    """

    vectors: np.ndarray
    tokens: np.ndarray

    def __post_init__(self):
        shapes = np.shape(self.vectors), np.shape(self.tokens)
        if len(shapes[0]) != 2 or shapes[1] != shapes[0][:1] or not shapes[1][0]:
            raise ValueError(
                f"entries are vectors [N, E] and tokens [N], at least one, got {[*shapes[0]]} and {[*shapes[1]]}"
            )
        if not np.isfinite(self.vectors).all():
            raise ValueError("vectors of entries must be finite: build them anew")

    def nearest(self, candidates: int = 64) -> Dense:
        """An exact retriever of these entries by Euclidean distance, whose queries are vectors.

        The nearest of q is the x with the largest q x - x^2 / 2, an inner product of longer vectors.

        Args:
          candidates: how many are looked at; at least as many as will be asked for.
        """
        own = np.asarray(self.vectors, np.float32)
        longer = np.concatenate([own, -0.5 * np.sum(np.square(own), axis=1, keepdims=True)], axis=1)
        return Dense(longer, _with_one, candidates)

    def distances(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Squared distances of entries from a query `[E]`, summed in float64 so that they depend on no batch."""
        return np.sum(np.square(self.vectors[ids].astype(np.float64) - query.astype(np.float64)), axis=1)


def _with_one(queries: Sequence[Any]) -> np.ndarray:
    own = np.asarray(queries, np.float32)
    return np.concatenate([own, np.ones((len(own), 1), np.float32)], axis=1)


def build_entries(model: Any, source: str | Path | Sequence[int], *, window: int = WINDOW) -> Entries:
    """Entries of a text, made with the model that will use them.

    Args:
      model: from `specjax.load`.
      source: a text file, or token ids.
      window: tokens that are read together; the first of a window knows nothing before it.

    Raises:
      ValueError: for a file that is not there or is no text, a text of fewer than two tokens, or a window that does not fit.
    """
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= model.max_length:
        raise ValueError(f"window must be a whole number from 1 to {model.max_length}, got {window!r}")
    ids = _ids(model, source)
    if len(ids) < 2:
        raise ValueError(f"entries need a text of two tokens or more, got {len(ids)}")
    if ids.min() < 0 or ids.max() >= model.lm.vocab_size:
        raise ValueError(f"token ids must be from 0 to {model.lm.vocab_size - 1}, got {ids.min()} to {ids.max()}")
    vectors = []
    for at in range(0, len(ids) - 1, window):
        own = ids[at : min(at + window, len(ids) - 1)]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(own)] = own
        vectors.append(to_host(_hidden(model.lm, model.params, jax.device_put(padded)))[0, : len(own)])
    return Entries(np.concatenate(vectors), ids[1:].astype(np.int32))


def _ids(model, source):
    if not isinstance(source, (str, Path)):
        return np.asarray(source, np.int64).reshape(-1)
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer to read a text with: give token ids")
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} cannot be read as UTF-8 text: give the path of a text file") from error
    return np.asarray(model.tokenizer.encode(text, add_special_tokens=False), np.int64)


@functools.partial(jax.jit, static_argnums=0)
@settled
def _hidden(lm, params, tokens):
    """The final hidden states `[1, T, E]` of a window."""
    batch, width = tokens.shape
    cache = lm.init_cache(batch, width, jax.tree.leaves(params)[0].dtype)
    positions = jnp.arange(width)[None]
    block = Block(tokens, positions, jnp.zeros(batch, jnp.int32))
    return lm(params, block, cache, wants=Wants(final=True)).final.astype(jnp.float32)
