"""Lookahead decoding: Jacobi iterations beside the text make n-grams, which are verified later (arXiv:2402.02057).

In the shape descriptions `B` denotes rows, `N` tokens of an n-gram, `W` columns of the window, `G` n-grams a bucket of the
pool holds, `K` buckets, `M` n-grams at a time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.draft.base import Drafter, Extra, Proposal
from specjax.lm import Wants
from specjax.sampling.sampler import best
from specjax.tree import Tree

Array = jax.Array


PIECE = 256
"""Tokens of a source whose n-grams go into the pool together."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState:
    """A row's guesses so far.

    Attributes:
      pool: `[B, K, G, N]` int32, n-grams by the bucket of their first token, the latest first; -1 where empty.
      window: `[B, N, W]` int32, the last step's window, and below it the target's output for its last level. Column c
        read downwards is an n-gram; column 0 begins at that step's root. -1 before the first step.
      length: `[B]` int32, tokens of the text whose n-grams are in the pool, minus one.
    """

    pool: Any
    window: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class Lookahead(Drafter):
    """Drafts from a pool of n-grams that start with the root; no parameters.

    A window of guesses runs beside the tree as extra slots: `level - 1` levels of `window` columns. Level r of column c
    is a guess at the token c + r places after the root. It sees the columns up to c on level 0, and its own column
    above itself.

    A step puts the n-grams of all columns into the pool and moves every level up by one. The window starts from the
    row's text. Window and tree do not see each other, except for the root.

    Guesses are the target's argmax whatever the temperature. Sampled text agrees with them less often, but does not
    change.

    The pool takes `4 * buckets * guesses * level` bytes per row (131 kB by default). With fewer buckets than tokens,
    tokens share buckets. A step reads `nodes + window * (level - 1) - 1` slots.

    Attributes:
      level: N, at least 3.
      window: W.
      guesses: G, the n-grams kept in a bucket; those that start with the root are merged into one tree, the latest
        first.
      nodes: the size of that tree, including the root; continuations that do not fit are left out.
      buckets: K, at most the vocabulary.
      text: whether n-grams of the prompt and of the new text go into the pool too.
    """

    about = About("lookahead", "n-grams from a Jacobi window that the target reads beside", "arXiv:2402.02057")

    level: int = 4
    window: int = 2
    guesses: int = 2
    nodes: int = 5
    buckets: int = 4096
    text: bool = True

    def __post_init__(self):
        if self.level < 3 or min(self.window, self.guesses, self.buckets) < 1:
            raise ValueError(f"lookahead needs level >= 3 and window, guesses, buckets >= 1, got {self}")
        most = 1 + self.guesses * (self.level - 1)
        if not 2 <= self.nodes <= most:
            raise ValueError(
                f"lookahead: {self.guesses} n-grams of {self.level} make trees of 2 to {most} nodes, not {self.nodes}"
            )

    @property
    def depth(self) -> int:
        return self.level - 1

    plain_tree = False

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def wants(self) -> Wants:
        return Wants(logits=True)  # cheaper than `topk`, which would rank all slots: `observe` reads W of them

    def bind(self, target):
        return dataclasses.replace(self, buckets=min(self.buckets, target.vocab_size))

    def init(self, params, batch, capacity):
        return LookaheadState(
            pool=jnp.full((batch, self.buckets, self.guesses, self.level), -1, jnp.int32),
            window=jnp.full((batch, self.level, self.window), -1, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def encode(self, params, draft, source, tokens):
        """Adds the source's n-grams to the pool."""
        if not self.text or tokens is None:
            return draft
        pool = draft.pool
        for at in range(0, tokens.shape[1], PIECE):
            pool = insert(pool, self._grams(tokens[:, at : at + PIECE + self.level - 1]))
        return dataclasses.replace(draft, pool=pool)

    def prefill(self, params, draft, chunk, output):
        """Adds the n-grams within one chunk to the pool; the few that cross a chunk boundary are missed."""
        length = draft.length + chunk.real.sum(axis=1, dtype=jnp.int32)
        pool = draft.pool
        if self.text:
            tokens = jnp.concatenate([chunk.block.tokens[:, :1], jnp.where(chunk.real, chunk.following, -1)], axis=1)
            pool = insert(pool, self._grams(tokens))
        return dataclasses.replace(draft, pool=pool, length=length)

    def _grams(self, tokens):
        """All n-grams of tokens `[B, T]`, `[B, M, N]`."""
        count = max(tokens.shape[1] + 1 - self.level, 0)
        return jnp.stack([tokens[:, i : i + count] for i in range(self.level)], axis=2)

    def propose(self, params, draft, view, sampler):
        grams = draft.window.swapaxes(1, 2)
        if self.text:
            grams = jnp.concatenate([grams, _latest(draft.length, view, self.level)], axis=1)
        pool = insert(draft.pool, grams)
        started = draft.window[:, :1, :1] >= 0
        window = jnp.where(started, draft.window[:, 1:], _start(view, self.level - 1, self.window))
        window = window.at[:, 0, 0].set(view.root)
        rows = jnp.arange(view.root.shape[0])
        found = pool[rows, view.root % self.buckets]
        tree = merge(view.root, found[:, :, 1:], found[:, :, 0] == view.root[:, None], self.nodes)
        shape = _shape(self.level, self.window)
        extra = Extra(
            tokens=window.reshape(-1, (self.level - 1) * self.window)[:, 1:],
            positions=view.length[:, None] - 1 + jnp.asarray(shape.offset)[None],
            visible=jnp.broadcast_to(
                jnp.asarray(shape.visible(self.nodes))[None],
                (view.root.shape[0], len(shape.offset), self.nodes + len(shape.offset)),
            ),
        )
        window = jnp.pad(window, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
        return Proposal(tree, LookaheadState(pool, window, view.length - 1), extra)

    def observe(self, params, draft, proposal, output, verdict):
        said = best(output.logits[:, -self.window :])
        return dataclasses.replace(draft, window=draft.window.at[:, -1].set(said))


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The window's slots, level by level, without the root's.

    Attributes:
      offset: `[X]`, positions minus the root's.
      own: `[X, X]` bool, which window slots each one sees.
    """

    offset: np.ndarray
    own: np.ndarray

    def visible(self, nodes: int) -> np.ndarray:
        """`[X, nodes + X]`: window slots see only the root of the tree."""
        root = np.arange(nodes)[None] == 0
        return np.concatenate([np.repeat(root, len(self.offset), axis=0), self.own], axis=1)


@functools.lru_cache(maxsize=16)
def _shape(level: int, window: int) -> _Shape:
    levels, columns = np.divmod(np.arange(1, (level - 1) * window), window)
    first = (levels[None] == 0) & (columns[None] <= columns[:, None])
    above = (levels[None] > 0) & (levels[None] <= levels[:, None]) & (columns[None] == columns[:, None])
    return _Shape(columns + levels, first | above)


def _start(view, levels: int, columns: int) -> Array:
    """A window `[B, levels, columns]` of n-grams of the text, taken at even distances."""
    begin = jnp.arange(columns)[None] * view.length[:, None] // columns
    index = (begin[:, None, :] + jnp.arange(levels)[None, :, None]) % view.length[:, None, None]
    tokens = jnp.take_along_axis(view.tokens, index.reshape(index.shape[0], -1), axis=1)
    return tokens.reshape(index.shape)


def _latest(length: Array, view, level: int) -> Array:
    """`[B, D + 1, level]`: the n-grams that end at tokens of the text from `length` + 1 on, else -1."""
    ends = view.length[:, None] - 1 - jnp.arange(view.max_depth, -1, -1)[None]
    index = ends[:, :, None] - jnp.arange(level - 1, -1, -1)[None, None]
    flat = jnp.maximum(index, 0).reshape(index.shape[0], -1)
    tokens = jnp.take_along_axis(view.tokens, flat, axis=1).reshape(index.shape)
    return jnp.where((index >= 0) & (ends > length[:, None])[:, :, None], tokens, -1)


@jax.vmap
def insert(pool: Array, grams: Array) -> Array:
    """The pool after n-grams `[B, M, N]` were added one after the other; n-grams with a negative id do not count.

    An n-gram that its bucket already holds becomes the latest; any other replaces the oldest. Buckets are written once,
    and all n-grams for one bucket are ranked together, so that the result does not depend on the order of writes.

    Args:
      pool: `[B, K, G, N]`.
      grams: `[B, M, N]` int32.
    """
    buckets, keep, size = pool.shape
    count = grams.shape[0]
    valid = jnp.all(grams >= 0, axis=1)
    bucket = jnp.where(valid, grams[:, 0] % buckets, buckets)
    order = jnp.arange(count)
    later = order[None, :] > order[:, None]
    together = (bucket[:, None] == bucket[None, :]) & valid[:, None]
    same = together & jnp.all(grams[:, None] == grams[None], axis=2)
    wins = valid & ~jnp.any(same & later, axis=1)
    place = jnp.sum(together & later & wins[None, :], axis=1)
    # the last n-gram for a bucket moves the bucket's old entries
    leads = valid & ~jnp.any(together & later, axis=1)
    old = pool[jnp.minimum(bucket, buckets - 1)]
    renewed = jnp.any(jnp.all(old[:, :, None] == grams[None, None], axis=3) & valid[None, None], axis=2)
    kept = leads[:, None] & (old[:, :, 0] >= 0) & ~renewed
    moved = jnp.sum(together & wins[None, :], axis=1)[:, None] + jnp.cumsum(kept, axis=1) - 1
    rows = jnp.concatenate([bucket, jnp.repeat(bucket, keep)])
    slots = jnp.concatenate([jnp.where(wins, place, keep), jnp.where(kept, moved, keep).reshape(-1)])
    return pool.at[rows, slots].set(jnp.concatenate([grams, old.reshape(-1, size)]), mode="drop")


def merge(root: Array, tails: Array, found: Array, nodes: int) -> Tree:
    """One tree of up to G continuations of the root; common beginnings share their nodes.

    Args:
      root: `[B]` int32.
      tails: `[B, G, D]` int32, the most important first.
      found: `[B, G]` bool, which of them exist.
      nodes: the tree's size. Nodes are numbered continuation by continuation; those that do not fit are left out.
    """
    batch, count, depth = tails.shape
    alike = jnp.cumprod(tails[:, :, None] == tails[:, None], axis=3, dtype=jnp.int32) > 0  # [B, G, G, D]
    first = jnp.argmax(alike & found[:, None, :, None], axis=2)  # [B, G, D], who has this beginning first
    own = found[:, :, None] & (first == jnp.arange(count)[None, :, None])
    ident = jnp.cumsum(own.reshape(batch, -1), axis=1).reshape(own.shape)
    ident = jnp.take_along_axis(ident, first, axis=1)
    parent = jnp.pad(ident, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
    level = jnp.broadcast_to(1 + jnp.arange(depth)[None, None], own.shape)
    place = jnp.where(own, ident, nodes).reshape(batch, -1)
    rows = jnp.arange(batch)[:, None]

    def put(empty, values):
        return jnp.full((batch, nodes), empty, jnp.int32).at[rows, place].set(values.reshape(batch, -1), mode="drop")

    tokens = put(-1, tails).at[:, 0].set(root)
    return Tree(
        tokens=tokens,
        parent=put(0, parent).at[:, 0].set(-1),
        depth=put(1, level).at[:, 0].set(0),
        valid=put(0, own).at[:, 0].set(1) > 0,
        max_depth=depth,
    )
