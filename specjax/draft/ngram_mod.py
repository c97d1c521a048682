"""A table from the hash of the last tokens to the next one, in constant memory (llama.cpp's `ngram-mod`).

In the shape descriptions `S` denotes slots of the table, `n` tokens of an n-gram, `M` n-grams at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.draft.base import ChainDrafter, View

Array = jax.Array

FACTOR = 6364136223846793005
"""Of the hash `h = h * FACTOR + token`, modulo the number of slots."""
CHUNK = 32
"""n-grams of a row that are learnt at once."""
FULL = 4
"""A table of which more than one in so many slots is used is cleared for the next text."""
LOW, PATIENCE = 0.25, 5
"""A table that has so little accepted in so many steps in a row is cleared."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hashes:
    """The table of all rows, and how much of each text is in it.

    Attributes:
      entries: `[S]` int32, the token that followed last; -1 in empty slots.
      used: `[1]` int32, how many slots are not empty.
      low: `[1]` int32, how many steps in a row had little accepted.
      read: `[B]` int32, n-grams of each row's text that are in the table.
      chain: `[B, length]` int32, each row's last draft, -1 from its end on.
    """

    entries: Array
    used: Array
    low: Array
    read: Array
    chain: Array


@dataclasses.dataclass(frozen=True)
class NgramMod(ChainDrafter):
    """A chain of look-ups: the token that followed the last n tokens, then that after the last n with it, and so on.

    The table has no keys, so a slot that another n-gram wrote is believed. The rows share it; of several writes in
    a step the one of the highest row counts, and of a row the last. That changes speed, never text.

    The table is cleared, and all running texts are learnt again, at a text's first step if more than a quarter of the
    slots are used, and after five steps in a row in which less than a quarter of the drafted tokens were accepted.
    Here all rows count together; in llama.cpp one row's failures clear the table.

    Attributes:
      length: how many tokens to propose, at most.
      min_length: where fewer are found, nothing is proposed.
      ngram: n.
      slots: S, a power of two; 4 bytes each.
    """

    about = About(
        "ngram_mod",
        "a hash table from the last tokens to the next one, of all rows",
        "ggml-org/llama.cpp",
        paper="length=64,min_length=48,ngram=24,slots=4194304",
    )

    length: int = 12
    min_length: int = 1
    ngram: int = 4
    slots: int = 1 << 20

    def __post_init__(self):
        if not 1 <= self.min_length <= self.length or self.ngram < 1:
            raise ValueError(f"ngram_mod needs 1 <= min_length <= length and ngram >= 1, got {self}")
        if self.slots < 1 or self.slots & (self.slots - 1) or self.slots > 1 << 30:
            raise ValueError(f"ngram_mod needs a power of two as slots, at most 2^30, got {self.slots}")

    skips = False

    @property
    def alone(self) -> bool:
        return False

    def init(self, params, batch, capacity):
        none = lambda size: jnp.zeros((size,), jnp.int32)
        empty = lambda *shape: jnp.full(shape, -1, jnp.int32)
        return Hashes(empty(self.slots), none(1), none(1), none(batch), empty(batch, self.length))

    def axes(self, draft):
        names: tuple[Any, ...] = (None,), (None,), (None,), ("batch",), ("batch", None)
        return Hashes(*names)

    def encode(self, params, draft, source, tokens):
        if tokens is None or tokens.shape[1] <= self.ngram:
            return draft
        grams = windows(tokens, self.ngram + 1)
        return learnt(draft, grams, jnp.all(grams >= 0, axis=2))

    def propose(self, params, draft, view, sampler):
        begins = jnp.any(view.live & (draft.read == 0) & (view.length > self.ngram))
        clears = (draft.low[0] >= PATIENCE) | (begins & (draft.used[0] * FULL > self.slots))
        draft = jax.lax.cond(clears, cleared, lambda draft: draft, draft)
        draft = read_texts(draft, view, self.ngram, learnt)
        back = view.length[:, None] - self.ngram + jnp.arange(self.ngram)[None]
        window = jnp.take_along_axis(view.tokens, jnp.maximum(back, 0), axis=1)

        def one(carry, _):
            window, going = carry
            found = draft.entries[index(window, self.slots)]
            going = going & (found >= 0)
            window = jnp.concatenate([window[:, 1:], found[:, None]], axis=1)
            return (window, going), jnp.where(going, found, -1)

        found = jax.lax.scan(one, (window, view.length >= self.ngram), None, self.length)[1].T
        enough = (found >= 0).sum(axis=1) >= self.min_length
        found = jnp.where(enough[:, None], found, -1)
        return self.chain(view, found, dataclasses.replace(draft, chain=found))

    def observe(self, params, draft, proposal, output, verdict):
        width = min(self.length, verdict.emitted.shape[1])
        own = jnp.where((verdict.committed > 0)[:, None], draft.chain[:, :width], -1)
        tree = proposal.tree  # a rule may have cut the chain
        deepest = jnp.where(tree.valid, tree.depth, 0).max(axis=1, keepdims=True)
        own = jnp.where(jnp.arange(width)[None] < deepest, own, -1)
        drafted = (own >= 0).sum()
        written = jnp.arange(width)[None] < verdict.committed[:, None]
        accepted = jnp.cumprod((own == verdict.emitted[:, :width]) & (own >= 0) & written, axis=1).sum()
        low = jnp.where(accepted < LOW * drafted, draft.low + 1, jnp.where(drafted > 0, 0, draft.low))
        return dataclasses.replace(draft, low=low)


def read_texts(draft: Any, view: View, ngram: int, learn: Callable[[Any, Array, Array], Any]) -> Any:
    """The state after every live row's text is learnt.

    Args:
      draft: before; its `read` `[B]` are the n-grams of each text that it has learnt.
      view: the rows.
      ngram: n.
      learn: the state after n-grams and the token after each, `[B, M, n + 1]`, of which some count, `[B, M]`.
    """

    def behind(draft):
        return view.live & (draft.read < view.length - ngram)

    def some(draft):
        at = draft.read[:, None] + jnp.arange(CHUNK + ngram)[None]
        text = jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        real = (at[:, ngram:] < view.length[:, None]) & view.live[:, None]
        new = learn(draft, windows(text, ngram + 1), real)
        return dataclasses.replace(new, read=draft.read + real.sum(axis=1, dtype=jnp.int32))

    return jax.lax.while_loop(lambda draft: jnp.any(behind(draft)), some, draft)


def windows(tokens: Array, width: int) -> Array:
    """All windows of tokens `[B, T]`, `[B, T - width + 1, width]`."""
    count = tokens.shape[1] - width + 1
    return jnp.stack([tokens[:, i : i + count] for i in range(width)], axis=2)


def index(grams: Array, slots: int) -> Array:
    """The slots of n-grams `[..., n]`, `[...]` int32; `slots` is a power of two, so 32 bits are enough."""
    size = grams.shape[-1]
    powers = np.asarray([pow(FACTOR, size - 1 - i, 1 << 32) for i in range(size)], np.uint32)
    terms = grams.astype(jnp.uint32) * jnp.asarray(powers).reshape((1,) * (grams.ndim - 1) + (size,))
    return (terms.sum(axis=-1, dtype=jnp.uint32) & jnp.uint32(slots - 1)).astype(jnp.int32)


def learnt(hashes: Hashes, grams: Array, real: Array) -> Hashes:
    """The table after n-grams and the token that follows each; of equal slots the last one counts.

    Args:
      hashes: before.
      grams: `[B, M, n + 1]` int32, the following token last.
      real: `[B, M]` bool, which of them count.
    """
    slots = hashes.entries.shape[0]
    slot = jnp.where(real, index(grams[..., :-1], slots), slots).reshape(-1)
    by = jnp.argsort(slot, stable=True)
    slot, value = slot[by], grams[..., -1].reshape(-1)[by]
    last = (slot != jnp.append(slot[1:], slots)) & (slot < slots)
    fresh = last & (hashes.entries.at[slot].get(mode="clip") < 0)
    entries = hashes.entries.at[jnp.where(last, slot, slots)].set(value, mode="drop")
    return dataclasses.replace(hashes, entries=entries, used=hashes.used + fresh.sum(dtype=jnp.int32))


def cleared(hashes: Hashes) -> Hashes:
    """An empty table, into which all texts are to be learnt again."""
    zero = jnp.zeros_like(hashes.used)
    entries, read = jnp.full_like(hashes.entries, -1), jnp.zeros_like(hashes.read)
    return dataclasses.replace(hashes, entries=entries, used=zero, low=zero, read=read)
