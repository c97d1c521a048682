"""The retrieval datastore: tokenised text, sorted for look-up. `specjax.draft.heads.datastore` keeps it in folders.

It is `{"tokens": [M], "suffixes": [S]}`.

- `tokens` holds the documents with the separator V, the first id outside the vocabulary, before, between and after them
  (uint16 if V fits, otherwise int32).
- `suffixes` (int32) holds every position that has a token of its own document before it and at it. They are sorted by
  the tokens before them, nearest first: a suffix array of the text read backwards.
"""

from collections.abc import Iterable, Sequence

import numpy as np

SPAN = 64
"""How many tokens positions are sorted by; positions that agree on all of these stay in text order."""


def build(documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Builds a datastore from token ids.

    Args:
      documents: the token ids of each; a match never reaches from one into the next.
      vocab_size: V.

    Raises:
      ValueError: if no document has two tokens, an id lies outside the vocabulary, or there are 2^31 tokens or more.
    """
    border = np.asarray([vocab_size], np.int64)
    parts = [border]
    for document in documents:
        if len(document):
            ids = np.asarray(document, np.int64)
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError(f"a document has token ids outside the vocabulary of {vocab_size} tokens")
            parts += [ids, border]
    tokens = np.concatenate(parts)
    if tokens.size >= 2**31:
        raise ValueError(f"{tokens.size} tokens are too many for one datastore: keep below 2^31")
    real = tokens != vocab_size
    places = 1 + np.flatnonzero(real[:-1] & real[1:])
    if not places.size:
        raise ValueError("no document has two tokens or more: there is nothing to look up")
    order = np.argsort(ranks(tokens, SPAN)[places], kind="stable")
    kind = np.uint16 if vocab_size < 2**16 else np.int32
    return {"tokens": tokens.astype(kind), "suffixes": places[order].astype(np.int32)}


def ranks(tokens: np.ndarray, span: int) -> np.ndarray:
    """Ranks `[M]` of all positions by the `span` tokens before them, nearest first; `span` is a power of two.

    Prefix doubling (Manber and Myers 1993): the ranks by w tokens here, and w tokens earlier, give the ranks by 2 w.
    """
    count = tokens.size
    rank = np.unique(np.concatenate([tokens[:1], tokens[:-1]]), return_inverse=True)[1].astype(np.int64)
    width = 1
    while width < min(span, count) and rank.max() < count - 1:
        earlier = np.concatenate([np.full(width, -1), rank[:-width]])
        rank = np.unique(rank * (count + 1) + earlier + 1, return_inverse=True)[1]
        width *= 2
    return rank
