"""Superposed decoding (Shen et al. 2024, arXiv:2405.18400): several drafts of a text from one stream of keys and values.

In the shape descriptions `B` denotes rows (prompts), `K` drafts of a row, `m` kept tokens, `C` candidates, `L` the text buffer,
`V` the vocabulary.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.heads.datastore import load_datastore
from specjax.lm import LM, Block, Mixture, Wants, check_mixtures
from specjax.search.base import Beams, Found, Search, SearchSettings, SearchState
from specjax.search.fork import chosen, merged, parted, spread
from specjax.search.ngrams import WEIGHTS, shares
from specjax.sharding.ambient import on_mesh
from specjax.sharding.rules import replicated
from specjax.state import Finish

Array = jax.Array
PyTree = Any

PENALTY = 200.0
"""Nats that a draft's next token costs if none of the kept tokens ever followed its last tokens."""


@dataclasses.dataclass(frozen=True)
class Superposed(SearchSettings):
    """K drafts that one pass reads together: its input is the mean of their last tokens' embeddings, by the drafts' weights.

    All drafts are continued by the m likeliest tokens of that one distribution. The K best candidates grow on, and
    texts that end are kept apart. A draft's score is its log-probability. Texts that have ended, and those that reach a
    row's limit, are ranked by that over their new tokens (the lowest perplexity first). So a row is done when no
    growing draft could still come to be among K texts that have ended.

    With n-grams (`params["ngrams"]`, a datastore) a candidate's log-probability is `(1 - alpha) log p + alpha log sum_i
    w_i P_i(v | the draft's last i tokens)`. The n-grams distinguish drafts, which one distribution cannot. A datastore
    has no ends of texts; for these the model's own probability replaces P_i.

    Attributes:
      superposed_drafts: K.
      superposed_tokens: m.
      superposed_temperature: the divisor of the logits; the released value is small.
      superposed_alpha: the share of n-grams.
      superposed_ngrams: the datastore of n-grams: a folder, a shipped name or a hub id; None for none.

    Raises:
      ValueError: for numbers out of range.
    """

    about = About(
        "superposed", "K drafts from one pass, which reads the mean of their last tokens", "arXiv:2405.18400", "own text",
        fields=("superposed_drafts", "superposed_tokens", "superposed_temperature", "superposed_alpha", "superposed_ngrams"),
    )  # fmt: skip
    called = "superposed decoding"

    superposed_drafts: int = 3
    superposed_tokens: int = 9
    superposed_temperature: float = 0.06
    superposed_alpha: float = 0.54
    superposed_ngrams: str | None = None

    def __post_init__(self):
        counts = self.superposed_drafts, self.superposed_tokens
        if not all(isinstance(count, int) and count >= 1 for count in counts):
            raise ValueError(
                f"superposed_drafts and superposed_tokens must be whole numbers from 1 on, got {counts[0]} and {counts[1]}"
            )
        if not 0 < self.superposed_temperature < math.inf:
            raise ValueError(
                f"superposed_temperature must be a finite number above 0, got {self.superposed_temperature}"
            )
        if not 0 <= self.superposed_alpha < 1:
            raise ValueError(f"superposed_alpha must be in [0, 1), got {self.superposed_alpha}")
        if self.superposed_ngrams is None and self.superposed_alpha != type(self).superposed_alpha:
            raise ValueError(
                "superposed_alpha is the share of n-grams: name a datastore with superposed_ngrams, or leave it out"
            )

    @property
    def per_token(self) -> str:
        return f" of the best texts, a step that reads all {self.superposed_drafts} drafts as one for each"

    def decoder(self, target: LM, mesh: Any) -> "SuperposedSearch":
        return SuperposedSearch(target, self, mesh)

    def params(self, model: Any, mesh: Any) -> PyTree:
        own = super().params(model, mesh)
        if self.superposed_ngrams is None:
            return own
        return own | {"ngrams": load_datastore(self.superposed_ngrams, model, mesh)}


@dataclasses.dataclass(frozen=True)
class SuperposedSearch(Search):
    """The decoder of `Superposed`.

    Raises:
      ValueError: for a target that reads no mixtures.
    """

    how: Superposed

    def __post_init__(self):
        check_mixtures(self.target)

    @property
    def num_texts(self) -> int:
        return self.how.superposed_drafts

    @property
    def has_ngrams(self) -> bool:
        """Whether `params` has a datastore of n-grams."""
        return self.how.superposed_ngrams is not None

    @property
    def num_caches(self) -> int:
        return 1

    def param_shardings(self, params: PyTree) -> PyTree:
        """See `Search.param_shardings`; n-grams lie on every device."""
        own = super().param_shardings(params)
        if not self.has_ngrams or self.mesh is None:
            return own
        return own | {"ngrams": replicated(self.mesh, params["ngrams"])}

    @on_mesh
    def step(self, params: PyTree, state: SearchState) -> tuple[SearchState, None]:
        """One target pass per row: each of its drafts grows by one token."""
        live, count = ~state.done, self.num_texts
        length = state.prompt_length + state.stats.steps
        old: Any = state.beams
        batch, _, capacity = old.tokens.shape
        with jax.named_scope("target"):
            output = self.target(
                params["target"], superposed(old, length), merged(state.cache), wants=Wants(logits=True)
            )
        logits = output.logits[:, 0]
        failed = jnp.isnan(logits).any(axis=1)
        ids, log_p = self._kept(state, logits, length, live)
        is_eos = (ids[..., None] == state.eos[:, None, None, :]).any(axis=3)
        with jax.named_scope("ngrams"):
            gained = self._smoothed(params, old.tokens, length, ids, log_p, is_eos)
        scores = (old.scores[:, :, None] + gained).reshape(batch, -1)

        # so many that at least K of them do not end
        size = min((1 + state.eos.shape[1]) * count, scores.shape[1])
        top, flat = jax.lax.top_k(scores, size)
        parent, token = flat // ids.shape[2], chosen(ids.reshape(batch, -1), flat)
        eos = (token[:, :, None] == state.eos[:, None, :]).any(axis=2)
        here = jnp.arange(capacity)[None, None] == length[:, None, None]
        texts = jnp.where(here, token[:, :, None], chosen(old.tokens, parent))
        at_limit = length + 1 >= state.limit
        per_token = top / (length + 1 - state.prompt_length)[:, None]
        ended = jnp.where((eos | at_limit[:, None]) & live[:, None], per_token, -jnp.inf)
        finish = jnp.where(eos, Finish.EOS, Finish.LENGTH).astype(jnp.int32)
        new = Found(texts, jnp.broadcast_to(length[:, None] + 1, top.shape), ended, finish)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), state.found, new)
        best = jax.lax.top_k(both.scores, count)[1]
        found = jax.tree.map(lambda x: chosen(x, best), both)

        going, picked = _top(jnp.where(eos, -jnp.inf, top), count)
        # scores only fall, so no growing draft can end better than with its present score over the most possible tokens
        hope = going[:, 0] / (state.limit - state.prompt_length)
        over = at_limit | (going[:, 0] == -jnp.inf) | (hope <= found.scores.min(axis=1)) | failed
        beams = Beams(chosen(texts, picked), going)
        after = jnp.where(token[:, 0] >= 0, length - 1, 0)  # tells XLA that the write comes after the pass
        with jax.named_scope("commit"):
            cache = self.target.commit(merged(state.cache), output.delta, None, after, live.astype(jnp.int32))
            cache = parted(cache, 1)
        return self._after(state, over, failed, beams, found, ~over[:, None], cache), None

    def _kept(self, state, logits, length, live) -> tuple[Array, Array]:
        """The m likeliest tokens of logits `[B, V]` and their log-probabilities, `[B, K, m]` each.

        All drafts share one distribution, unless warpers read what each of them says.
        """
        count, size = self.num_texts, min(self.how.superposed_tokens, logits.shape[1])
        if self.greedy and not self.how.processors:
            scores = logits[:, None]
        else:
            sampler = self._sampler(state, state.beams.tokens, length, live)
            scores = parted(sampler.penalised(merged(spread(logits, count))[:, None])[:, 0], count)
        top, ids = jax.lax.top_k(scores, size)
        some = top[..., :1] > -jnp.inf
        log_p = jax.nn.log_softmax(jnp.where(some, top / self.how.superposed_temperature, 0.0), axis=-1)
        shape = (logits.shape[0], count, size)
        return jnp.broadcast_to(ids, shape), jnp.broadcast_to(jnp.where(some, log_p, -jnp.inf), shape)

    def _smoothed(self, params, texts, length, ids, log_p, is_eos) -> Array:
        """What every candidate adds to its draft's score, `[B, K, m]`; never above 0."""
        if not self.has_ngrams:
            return log_p
        alpha = self.how.superposed_alpha
        flat = merged(texts), jnp.repeat(length, self.num_texts), merged(ids)
        share = parted(shares(params["ngrams"], *flat), self.num_texts)
        known = (share > 0) & (log_p > -jnp.inf) & ~is_eos
        log_share = jnp.where(is_eos, math.log(sum(WEIGHTS)) + log_p, jnp.log(jnp.where(known, share, 1.0)))
        own = jnp.where(known | is_eos, (1 - alpha) * log_p + alpha * log_share, -jnp.inf)
        return jnp.where(known.any(axis=2, keepdims=True), own, (1 - alpha) * log_p - PENALTY)


def superposed(beams: Beams, length: Array) -> Block:
    """The one-slot block that reads the last tokens of all drafts, `length` `[B]` tokens long, weighted by probability.

    A row's first pass reads its prompt's last token, because only the first draft has a score then. Positions are
    shared.
    """
    at = length - 1
    last = jnp.take_along_axis(beams.tokens, at[:, None, None], axis=2)[:, :, 0]
    grows = (beams.scores > -jnp.inf).any(axis=1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(grows, beams.scores, 0.0), axis=1)
    first = jnp.take_along_axis(last, jnp.argmax(beams.scores, axis=1)[:, None], axis=1)
    mixture = Mixture(last[:, None], weights[:, None], jnp.ones_like(first, bool))
    return Block(first, at[:, None], at, mixture=mixture)


def _top(scores: Array, count: int) -> tuple[Array, Array]:
    """The best `count` of `[B, C]`; if there are fewer candidates, the rest have -inf."""
    scores = jnp.pad(scores, ((0, 0), (0, max(count - scores.shape[1], 0))), constant_values=-jnp.inf)
    best, at = jax.lax.top_k(scores, count)
    return best, jnp.where(best > -jnp.inf, at, 0)
