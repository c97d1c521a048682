"""REST: continuations of the text's last tokens, looked up in a datastore (He et al. 2024, arXiv:2311.08252).

In the shape descriptions `M` denotes the store's tokens, `S` its sorted positions, `Q` searches per row, `R` matches.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Drafter, Proposal, View, ladder
from specjax.draft.datastore import SPAN
from specjax.tree import Tree

Array = jax.Array

_FAN = 8  # every round of the search splits its interval into this many parts
_END = 2**31 - 1  # follows a sequence's last token, and sorts after all others


@dataclasses.dataclass(frozen=True)
class Rest(Drafter):
    """A tree of the most frequent continuations of the longest suffix of the text that the datastore holds.

    `params["draft"]` is a datastore (`specjax.draft.datastore.build`): `tokens` `[M]` unsigned, with V between
    documents, and `suffixes` `[S]` int32, positions of `tokens` sorted by the text before them, read backwards. So one
    search finds the longest suffix, and all of its matches lie side by side.

    Attributes:
      nodes: kept tree nodes, including the root: the most frequent prefixes of the continuations, shorter before
        longer.
      length: tokens of a continuation.
      matches: R, how many of a suffix's matches are read; if there are more, they are taken at even distances.
      span: the longest suffix that is looked up.
      min_span: the shortest suffix.
      vocab_size: filled in from the target.
    """

    about = About(
        "rest",
        "what followed the last tokens in a datastore (`specjax datastore build`)",
        "arXiv:2311.08252",
        loads="datastore",
    )

    nodes: int = 6
    length: int = 4
    matches: int = 32
    span: int = 16
    min_span: int = 2
    vocab_size: int | None = None

    needs_params = True

    def __post_init__(self):
        most = 1 + self.length * self.matches
        if self.length < 1 or self.matches < 1 or not 2 <= self.nodes <= most:
            raise ValueError(f"rest needs length, matches >= 1 and nodes in [2, {most}], got {self}")
        if not 1 <= self.min_span <= self.span <= SPAN:
            raise ValueError(f"rest needs 1 <= min_span <= span <= {SPAN}, got {self.min_span} and {self.span}")

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def bind(self, target):
        return dataclasses.replace(self, vocab_size=target.vocab_size)

    def propose(self, params, draft, view, sampler):
        recent = last_tokens(view, self.span)
        size = self.vocab_size or 0
        tokens, _ = continuations(params["draft"], recent, self.min_span, self.matches, self.length, size)
        real = tokens >= 0
        return Proposal(frequent(view.root, tokens, real, self.nodes), draft)


def last_tokens(view: View, count: int) -> Array:
    """Each row's last tokens `[B, count]` int32, the very last first; -1 before its beginning."""
    back = view.length[:, None] - 1 - jnp.arange(count)[None]
    return jnp.where(back >= 0, jnp.take_along_axis(view.tokens, jnp.maximum(back, 0), axis=1), -1)


def continuations(
    store: dict[str, Array], recent: Array, min_span: int, matches: int, length: int, vocab: int
) -> tuple[Array, Array]:
    """What followed the longest suffix of each row's text that the store holds.

    Args:
      store: see `Rest`.
      recent: `[B, span]` int32, see `longest`.
      min_span: shorter matches do not count.
      matches: R; if there are more, they are taken at even distances.
      length: C, tokens of a continuation.
      vocab: V, which stands between documents.

    Returns:
      Tokens `[B, R, C]` int32, -1 from a document's end on and where there is no match; and the suffix's length `[B]`.
    """
    first, count, size = longest(store, recent, min_span)
    turn = jnp.arange(matches)[None]
    chosen = first[:, None] + turn * jnp.maximum(count[:, None] // matches, 1)
    starts = store["suffixes"].at[chosen].get(mode="clip")
    ahead = starts[:, :, None] + jnp.arange(length)[None, None]
    tokens = store["tokens"].at[ahead].get(mode="clip").astype(jnp.int32)  # the last one stands between documents
    real = jnp.cumsum(tokens >= vocab, axis=2) == 0
    return jnp.where(real & (turn < count[:, None])[:, :, None], tokens, -1), size


def longest(store: dict[str, Array], recent: Array, min_span: int) -> tuple[Array, Array, Array]:
    """The longest suffix of each row's text that occurs before some position of the store.

    Args:
      store: see `Rest`.
      recent: `[B, span]` int32, the text's last tokens, the very last first; -1 before its beginning.
      min_span: shorter matches do not count.

    Returns:
      The first of its matches (an index into `suffixes`), their number, and the suffix's length, `[B]` int32 each; the
      latter two are 0 if nothing is found.
    """
    size, span = store["suffixes"].shape[0], recent.shape[1]
    place = search(store, recent, jnp.full((recent.shape[0], 1), span), (False,))
    beside = jnp.clip(place + jnp.asarray([[-1, 0]]), 0, size - 1)  # these agree longest of all positions
    same = _before(store, beside, span) == recent[:, None, :]
    length = jnp.cumprod(same, axis=-1).sum(axis=-1).max(axis=1)
    ends = search(store, recent, jnp.repeat(length[:, None], 2, axis=1), (False, True))
    found = length >= min_span
    return ends[:, 0], jnp.where(found, ends[:, 1] - ends[:, 0], 0), jnp.where(found, length, 0)


def search(store: dict[str, Array], recent: Array, length: Array, after: tuple[bool, ...]) -> Array:
    """Where a text belongs among the sorted positions, `[B, Q]` int32 in `[0, S]`.

    Args:
      store: see `Rest`.
      recent: `[B, span]` int32, see `longest`.
      length: `[B, Q]`, how many of them are compared.
      after: Q flags, whether the text belongs after its equals (True) or before them.
    """
    size, span = store["suffixes"].shape[0], recent.shape[1]
    behind = jnp.asarray(after)[None, :, None]
    turn_of = jnp.arange(span)[None, None, None]
    compared = turn_of < length[:, :, None, None]

    def narrow(_, interval):
        low, high = interval  # positions below `low` come before the text, those from `high` on do not
        step = (high - low + _FAN - 1) // _FAN
        turn = jnp.arange(1, _FAN)[None, None]
        pivot = low[:, :, None] + turn * step[:, :, None] - 1
        inside = (pivot < high[:, :, None]) & (step[:, :, None] > 0)
        theirs = _before(store, jnp.clip(pivot, 0, size - 1), span)
        ours = recent[:, None, None, :]
        differs = (theirs != ours) & compared
        at = jnp.where(differs, turn_of, span).min(axis=-1, keepdims=True)  # the first difference decides
        less = jnp.where(at[..., 0] < span, jnp.any((turn_of == at) & (theirs < ours), axis=-1), behind)
        below = (inside & less).sum(axis=-1)
        high = jnp.where(below < _FAN - 1, jnp.minimum(high, low + (below + 1) * step - 1), high)
        return low + below * step, jnp.maximum(high, low + below * step)

    rounds, width = 0, size
    while width:
        rounds, width = rounds + 1, -(-width // _FAN) if width > 1 else 0
    zeros = jnp.zeros(length.shape, jnp.int32)
    return jax.lax.fori_loop(0, rounds, narrow, (zeros, zeros + size))[0]


def _before(store: dict[str, Array], index: Array, span: int) -> Array:
    """The `span` tokens before sorted positions `index` `[...]`, nearest first, `[..., span]` int32."""
    back = store["suffixes"][index][..., None] - 1 - jnp.arange(span).reshape((1,) * index.ndim + (span,))
    return store["tokens"][jnp.maximum(back, 0)].astype(jnp.int32)  # the first one stands between documents


def frequent(root: Array, tokens: Array, real: Array, nodes: int) -> Tree:
    """The most frequent prefixes of some sequences as a tree: most frequent first, and on a tie the shorter first.

    A prefix is as frequent as any that it begins, so the parent of every kept prefix is kept before it.

    Args:
      root: `[B]` int32.
      tokens: `[B, R, C]` int32.
      real: `[B, R, C]` bool; a sequence ends before its first False.
      nodes: of the tree, at least 2 and at most `1 + R C`.
    """
    batch, rows, length = tokens.shape
    tokens = jnp.where(jnp.cumsum(~real, axis=2) == 0, tokens, _END)
    tokens = jnp.stack(jax.lax.sort([tokens[:, :, i] for i in range(length)], dimension=1, num_keys=length), axis=1)
    # Now `[B, C, R]`: at every depth, equal prefixes lie side by side, and a run of them is one candidate, at its start.
    index = jnp.arange(rows)[None, None]
    changes = jnp.pad(tokens[:, :, 1:] != tokens[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
    starts = jnp.cumsum(changes, axis=1) > 0
    following = jax.lax.cummin(jnp.where(starts, index, rows), axis=2, reverse=True)
    following = jnp.pad(following[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=rows)
    counts = jnp.where(starts & (tokens != _END), following - index, 0)
    leader = jax.lax.cummax(jnp.where(starts, index, 0), axis=2) + rows * jnp.arange(length)[None, :, None]
    parents = jnp.pad(leader[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=-1)

    flat = lambda x: x.reshape(batch, -1)
    count, chosen = jax.lax.top_k(
        flat(counts).astype(jnp.float32), nodes - 1
    )  # on a tie the shorter, because it comes first
    valid = count > 0
    pick = lambda x: jnp.take_along_axis(flat(x), chosen, axis=1)
    place = (pick(parents)[:, :, None] == chosen[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    parent = jnp.where(place, jnp.arange(1, nodes, dtype=jnp.int32)[None, None], 0).max(axis=2)
    first = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    return Tree(
        tokens=jnp.concatenate([root[:, None], jnp.where(valid, pick(tokens), -1)], axis=1).astype(jnp.int32),
        parent=first(parent, -1),
        depth=first(jnp.where(valid, 1 + chosen // rows, 1).astype(jnp.int32), 0),
        valid=first(valid, True),
        max_depth=length,
    )
