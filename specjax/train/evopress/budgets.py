"""Budgets of a cache that forgets, one for each layer: the third search of EvoPress, whose paper has weights alone.

A prompt is read whole before a policy forgets anything of it, so what a layer keeps depends on its own budget and on no
other layer's. The bodies of all layers are therefore made once for every level, in their true sizes, and a candidate
takes one of each layer. Then only the answer is read again.

In the shape descriptions `B` denotes rows, `P` tokens of prompts, `A` tokens of answers, `L` layers, `n` levels, `C` slots of
the greatest body, `V` the vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants
from specjax.models.caches import Old, OldCache
from specjax.models.llama import LlamaLM
from specjax.settings import settled
from specjax.train.data import Rows
from specjax.train.evopress.fitness import divergence
from specjax.train.evopress.population import Candidate, Cut
from specjax.warpers.lists import rounded

Array = jax.Array
CHUNK = 64
"""Prompt tokens read at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """A body as queries see it.

    Attributes:
      key: `[B, K, C, H]`.
      value: as `key`.
      seen: `[B, C]` bool.
    """

    key: Array
    value: Array
    seen: Array


@dataclasses.dataclass(frozen=True)
class Made(Old):
    """The policy of bodies that were made by others: it is read, and never folds."""

    def init(self, config, layer, batch, capacity, dtype):
        return None

    def begin(self, bodies, prompts, folded, lengths):
        return bodies

    def fold(self, bodies, layers, folded):
        return bodies

    def read(self, body, folded):
        return body.key, body.value, body.seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Rows whose prompts were read.

    Attributes:
      whole: `[B, A, V]`, the whole model's logits along the answers.
      cache: the newest tokens, without bodies.
      bodies: of every layer that keeps older tokens, `Seen` with the levels in front, `[n, B, ...]`.
    """

    whole: Array
    cache: OldCache
    bodies: tuple[Seen, ...]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A prompt and its answer.

    Attributes:
      ids: of both.
      first: where the answer begins, at least 1.
      due: which tokens are predicted, as long as `ids`.
    """

    ids: np.ndarray
    first: int
    due: np.ndarray


def conversations(rows: Rows, least: int) -> list[Conversation]:
    """The documents of rows whose prompts have at least `least` tokens.

    Raises:
      ValueError: if there is none.
    """
    found, longest = [], 0
    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.mask)
    documents = np.zeros_like(tokens) if rows.documents is None else np.asarray(rows.documents)
    for ids, due, own in zip(tokens, mask, documents, strict=True):
        for document in np.unique(own):
            places = np.flatnonzero(own == document)
            if not due[places].any():
                continue
            places = places[: np.flatnonzero(due[places])[-1] + 1]
            first = int(np.argmax(due[places]))
            longest = max(longest, first)
            if first >= least:
                found.append(Conversation(ids[places], first, due[places]))
    if not found:
        raise ValueError(
            f"a cache that forgets needs prompts of at least {least} tokens to forget any, and the text's longest one has "
            f"{longest}: give lines with longer prompts, and a --length that holds them with their answers"
        )
    return found


@dataclasses.dataclass(frozen=True)
class CacheDivergence:
    """How far a model whose cache forgets is from the one that keeps all: nats by token of the answers.

    Attributes:
      lm: the model.
      params: its parameters.
      policies: one for each level, which differ in their budgets alone.
      levels: their budgets, ascending.
      texts: what is read.
      top: compares over so many of the whole model's likeliest tokens; None: over all.
      batch: the most rows of a pass.
    """

    lm: LlamaLM
    params: Any
    policies: tuple[Old, ...]
    levels: tuple[int, ...]
    texts: Sequence[Conversation]
    top: int | None = None
    batch: int = 8

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The tokens of every conversation."""
        return [len(text.ids) for text in self.texts]

    def check_rounds(self, tokens: Sequence[int]) -> None:
        """Raises ValueError if a round of so many tokens might read no answer."""
        longest = max(text.first for text in self.texts)
        if min(tokens) <= longest:
            raise ValueError(
                f"a round reads {min(tokens)} tokens, and a prompt of the data has {longest}: give more --tokens, or shorter "
                "prompts"
            )

    def __call__(self, candidates: Sequence[Candidate], chosen: Sequence[Cut]) -> list[float]:
        """See `specjax.train.evopress.population.Fitness`; `inf` for a candidate whose numbers are not finite."""
        totals: list[list[Array]] = [[] for _ in candidates]
        count = 0
        lms = tuple(dataclasses.replace(self.lm, old=policy, ahead=1) for policy in self.policies)
        for at in range(0, len(chosen), self.batch):
            prompts, counts, after, due = self._arrays(chosen[at : at + self.batch])
            count += int(due.sum())
            prompts, counts, after, due = jax.device_put((prompts, counts, after, due))
            prepared = _prepared(lms, self.params, prompts, counts, after)
            for own, candidate in zip(totals, candidates, strict=True):
                places = jax.device_put(np.asarray([self.levels.index(level) for level in candidate[0]], np.int32))
                own.append(_total(lms[0], self.params, prepared, places, counts, after, due, self.top))
        means = np.asarray(jax.device_get(totals), np.float64).sum(axis=1) / count
        return [float(own) if math.isfinite(own) else math.inf for own in means]

    @functools.cached_property
    def _widths(self) -> tuple[int, int]:
        prompt = max(text.first for text in self.texts) - 1
        return -(-prompt // CHUNK) * CHUNK, rounded(max(len(text.ids) - text.first for text in self.texts))

    def _arrays(self, chosen: Sequence[Cut]) -> tuple[np.ndarray, ...]:
        """Prompts without their last tokens `[B, P]`, how many they are `[B]`, the tokens after them `[B, A]`, and which of
        these have a next one to predict `[B, A]`."""
        wide, narrow = self._widths
        prompts, after = np.zeros((self.batch, wide), np.int32), np.zeros((self.batch, narrow), np.int32)
        counts, due = np.zeros(self.batch, np.int32), np.zeros((self.batch, narrow), bool)
        for row, (index, size) in enumerate(chosen):
            text = self.texts[index]
            before = text.first - 1
            prompts[row, :before], counts[row] = text.ids[:before], before
            own = text.ids[before:-1]
            after[row, : len(own)] = own
            due[row, : len(own)] = text.due[text.first :] & (np.arange(text.first, len(text.ids)) < size)
        return prompts, counts, after, due


def _block(after: Array, counts: Array) -> Block:
    return Block(after, counts[:, None] + jnp.arange(after.shape[1], dtype=jnp.int32)[None], counts)


@functools.partial(jax.jit, static_argnums=0)
@settled
def _prepared(lms: tuple[LlamaLM, ...], params: Any, prompts: Array, counts: Array, after: Array) -> Prepared:
    rows, width = prompts.shape
    dtype = jax.tree.leaves(params)[0].dtype
    fresh = [lm.init_cache(rows, width, dtype) for lm in lms]

    def read(i: Array, cache: Any) -> Any:
        begin = jnp.full((rows,), i * CHUNK, jnp.int32)
        part = jax.lax.dynamic_slice_in_dim(prompts, i * CHUNK, CHUNK, 1)
        output = lms[0](params, _block(part, begin), cache, wants=Wants())
        return lms[0].commit(cache, output.delta, None, begin, jnp.clip(counts - begin, 0, CHUNK))

    cache = jax.lax.fori_loop(0, width // CHUNK, read, lms[0].reading(fresh[0], width))
    whole = lms[0](params, _block(after, counts), cache, wants=Wants(logits=True)).logits
    begun = [
        lm.begin(params, dataclasses.replace(cache, after=own), counts + 1) for lm, own in zip(lms, fresh, strict=True)
    ]
    levels = [[_seen(one, body) for body in one.bodies if body is not None] for one in begun]
    most = max(body.key.shape[2] for layers in levels for body in layers)
    bodies = tuple(
        jax.tree.map(lambda *own: jnp.stack(own), *(_padded(body, most) for body in own))
        for own in zip(*levels, strict=True)
    )
    return Prepared(whole, dataclasses.replace(begun[0], bodies=tuple(None for _ in begun[0].bodies)), bodies)


def _seen(cache: OldCache, body: Any) -> Seen:
    return Seen(*cache.policy.read(body, cache.folded))


def _padded(body: Seen, size: int) -> Seen:
    """A body with more slots, which nobody sees."""
    more = size - body.key.shape[2]
    wide = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
    return Seen(wide(body.key), wide(body.value), jnp.pad(body.seen, ((0, 0), (0, more))))


@functools.partial(jax.jit, static_argnums=(0, 7))
@settled
def _total(
    lm: LlamaLM, params: Any, prepared: Prepared, places: Array, counts: Array, after: Array, due: Array,
    top: int | None,
) -> Array:  # fmt: skip
    """The divergence of a candidate, summed over the tokens that are due.

    Args:
      places: `[L]` int32, the level of each layer.
    """
    chosen = iter([jax.tree.map(lambda x, i=i: x[places[i]], body) for i, body in enumerate(prepared.bodies)])
    own = prepared.cache
    bodies = tuple(None if lm.config.window(layer) is not None else next(chosen) for layer in lm.config.owners)
    policy = Made(recent=own.policy.recent, chunk=own.policy.chunk)
    cache: Any = dataclasses.replace(own, bodies=bodies, policy=policy)
    logits = lm(params, _block(after, counts), cache, wants=Wants(logits=True)).logits
    return jnp.where(due, divergence(prepared.whole, logits, top), 0.0).sum()
