"""Probabilities of a token after the two before it: counted in a row's own text, or looked up in tables on the device.

The counts are smoothed by Dirichlet priors, each order by the next lower one and the lowest by an even distribution over
V tokens (MacKay and Peto 1995): `p(v | h) = (n(h, v) + a p(v | h')) / (n(h) + a)`, where h' is h without its first token.

Tables are those of a back-off model (Katz 1987): `p(v | h)` is in a table, or `b(h) p(v | h')`. Counts of a corpus make
such tables, and a file of KenLM holds them (`specjax.draft.heads.arpa`). They are a dict of arrays, with N pairs and M
triples:

- `unigram`, `backoff` `[V]` float32: log-probabilities, and the logarithm of b;
- `first` `[V + 1]` int32: where a token's pairs begin; `second` `[N]` int32: their second tokens, ascending for each
  first one; `bigram`, `pair_backoff` `[N]` float32;
- `pair` `[N + 1]` int32: where a pair's triples begin; `third` `[M]` int32, ascending for each pair; `trigram` `[M]`
  float32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Tables = Mapping[str, Array]


def in_text(tokens: Array, length: Array, context: Array, after: Array, vocab_size: int, prior: float) -> Array:
    """Log-probabilities of C tokens after F contexts, by counts in the rows' texts.

    Args:
      tokens: `[B, L]` int32.
      length: `[B]`; what follows is not read.
      context: `[B, F, 2]` int32, the token before the last one, and the last one; -1 for none.
      after: `[B, C]` int32.
      vocab_size: V.
      prior: a, in counts.

    Returns:
      `[B, F, C]` float32.
    """
    real = jnp.arange(tokens.shape[1])[None] < length[:, None]
    shifted = lambda by: jnp.pad(tokens, ((0, 0), (by, 0)), constant_values=-2)[:, : tokens.shape[1]]
    last = (shifted(1)[:, None] == context[:, :, 1:]) & real[:, None]
    both = last & (shifted(2)[:, None] == context[:, :, :1])
    here = ((tokens[:, None] == after[:, :, None]) & real[:, None]).astype(jnp.float32)
    found = (here.sum(axis=2) + prior / vocab_size) / (length[:, None] + prior)
    found = found[:, None]
    for before in (last.astype(jnp.float32), both.astype(jnp.float32)):
        seen = jnp.einsum("bfl,bcl->bfc", before, here)
        found = (seen + prior * found) / (before.sum(axis=2, keepdims=True) + prior)
    return jnp.log(found)


def in_tables(tables: Tables, context: Array, after: Array) -> Array:
    """Log-probabilities `[B, F, C]` float32 of tokens `[B, C]` after contexts `[B, F, 2]`, see `in_text`, by tables."""
    vocab_size = tables["unigram"].shape[0]
    old, last = context[:, :, 0], context[:, :, 1]
    after = jnp.broadcast_to(after[:, None], (*last.shape, after.shape[1]))
    pair = _find(tables["first"], tables["second"], old, last, (old >= 0) & (old < vocab_size))
    triple = _find(tables["pair"], tables["third"], pair[..., None], after, pair[..., None] >= 0)
    known = (last >= 0) & (last < vocab_size)
    lower = _find(tables["first"], tables["second"], last[..., None], after, known[..., None])
    back = jnp.where(known, tables["backoff"][jnp.clip(last, 0, vocab_size - 1)], 0.0)[..., None]
    one = back + tables["unigram"][jnp.clip(after, 0, vocab_size - 1)]
    two = jnp.where(lower >= 0, tables["bigram"][jnp.maximum(lower, 0)], one)
    back = jnp.where(pair >= 0, tables["pair_backoff"][jnp.maximum(pair, 0)], 0.0)[..., None]
    return jnp.where(triple >= 0, tables["trigram"][jnp.maximum(triple, 0)], back + two)


def _find(starts: Array, column: Array, row: Array, value: Array, known: Array) -> Array:
    """Where a value lies in its row of a column, -1 where nowhere: a binary search."""
    row = jnp.where(known, row, 0)
    low, end = jnp.broadcast_arrays(starts[row], starts[row + 1], value)[:2]
    last = column.shape[0] - 1

    def narrow(_, interval):
        low, high = interval
        middle = (low + high) // 2
        less = (column[jnp.minimum(middle, last)] < value) & (low < high)
        return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

    low = jax.lax.fori_loop(0, column.shape[0].bit_length(), narrow, (low, end))[0]
    return jnp.where(known & (low < end) & (column[jnp.minimum(low, last)] == value), low, -1)


def counted(tokens: np.ndarray, vocab_size: int, prior: float) -> dict[str, np.ndarray]:
    """Tables of a corpus's counts.

    Args:
      tokens: `[M]`, documents with V between them, as in `specjax.draft.datastore`; nothing is counted across V.
      vocab_size: V.
      prior: a, in counts.
    """
    ids = np.asarray(tokens, np.int64)
    runs = [ids[np.flatnonzero(ids < vocab_size)][:, None]]
    for size in (2, 3):
        windows = np.lib.stride_tricks.sliding_window_view(ids, size) if ids.size >= size else np.zeros((0, size), int)
        runs.append(windows[(windows < vocab_size).all(axis=1)])
    one = np.bincount(runs[0][:, 0], minlength=vocab_size)
    (two, twos), (three, threes) = (np.unique(run, axis=0, return_counts=True) for run in runs[1:])
    before = np.bincount(two[:, 0], twos, minlength=vocab_size)  # how often a token is followed by one
    where = {pair: index for index, pair in enumerate(map(tuple, two.tolist()))}
    of = np.asarray([where[pair] for pair in map(tuple, three[:, :2].tolist())], np.int64)
    followed = np.bincount(of, threes, minlength=len(two))
    unigram = (one + prior / vocab_size) / (one.sum() + prior)
    bigram = (twos + prior * unigram[two[:, 1]]) / (before[two[:, 0]] + prior)
    lower = np.asarray([where[pair] for pair in map(tuple, three[:, 1:].tolist())], np.int64)
    trigram = (threes + prior * bigram[lower]) / (followed[of] + prior)
    logs = [np.log(part) for part in (unigram, prior / (before + prior), bigram, prior / (followed + prior), trigram)]
    return tables_of(logs[0], logs[1], two, logs[2], logs[3], three, logs[4])


def tables_of(
    unigram: np.ndarray,
    backoff: np.ndarray,
    two: np.ndarray,
    bigram: np.ndarray,
    pair_backoff: np.ndarray,
    three: np.ndarray,
    trigram: np.ndarray,
) -> dict[str, np.ndarray]:
    """Tables from sorted n-grams and their natural logarithms.

    Args:
      unigram: `[V]`.
      backoff: `[V]`.
      two: `[N, 2]`, ascending.
      bigram: `[N]`.
      pair_backoff: `[N]`.
      three: `[M, 3]`, ascending; each one's first two tokens are a pair of `two`.
      trigram: `[M]`.
    """
    vocab_size, size = len(unigram), len(two)
    code = lambda pairs: pairs[:, 0] * vocab_size + pairs[:, 1]
    of = np.searchsorted(code(two), code(three))
    starts = lambda counts: np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    some = lambda column, kind: np.asarray(column if len(column) else [0], kind)  # a search needs a slot to look at
    return {
        "unigram": unigram.astype(np.float32),
        "backoff": backoff.astype(np.float32),
        "first": starts(np.bincount(two[:, 0], minlength=vocab_size)),
        "second": some(two[:, 1], np.int32),
        "bigram": some(bigram, np.float32),
        "pair_backoff": some(pair_backoff, np.float32),
        "pair": starts(np.bincount(of, minlength=max(size, 1))),
        "third": some(three[:, 2], np.int32),
        "trigram": some(trigram, np.float32),
    }
