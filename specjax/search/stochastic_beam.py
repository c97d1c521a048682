"""Stochastic beam search (Kool et al. 2019, arXiv:1903.06059): K texts of a prompt, drawn without replacement.

In the shape descriptions `B` denotes rows (prompts), `K` texts of a row, `L` the text buffer, `V` the vocabulary.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.stochastic_beam import lowered
from specjax.lm import LM
from specjax.sampling.noise import gumbel_at
from specjax.search.base import Beams, Found, Search, SearchSettings, SearchState
from specjax.search.fork import chosen, merged, parted
from specjax.sharding.ambient import on_mesh
from specjax.state import Finish

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn(Beams):
    """Texts that grow; their `scores` are log-probabilities with Gumbel noise.

    Attributes:
      log_probs: `[B, K]` float32, of their new tokens, under the distribution that they are drawn from.
    """

    log_probs: Array

    @classmethod
    def of(cls, prompts: Array, count: int, groups: int) -> Self:
        first = Beams.of(prompts, count, groups)
        return cls(first.tokens, first.scores, first.scores + 0)  # each a separate buffer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawnFound(Found):
    """Texts that have ended, with the same numbers.

    With the K-th score as threshold `k`, the first K - 1 texts are importance samples, each with weight
    `p / (1 - exp(-exp(log p - k)))` (section 4.1).

    Attributes:
      log_probs: `[B, K]` float32.
    """

    log_probs: Array

    @classmethod
    def nothing(cls, batch: int, count: int, capacity: int) -> Self:
        return cls(**vars(Found.nothing(batch, count, capacity)), log_probs=jnp.zeros((batch, count)) - jnp.inf)


@dataclasses.dataclass(frozen=True)
class StochasticBeam(SearchSettings):
    """K different texts, as if drawn one after the other without replacement.

    A text's score is its log-probability with Gumbel noise. The best of its continuations has the text's own score, so
    the K best of all texts are found in one pass from left to right. The first text is the one that plain decoding
    draws at the same seed. Rows have a temperature, and their distribution is the one after all warpers.

    Attributes:
      stochastic_beams: K.

    Raises:
      ValueError: if that is not a whole number of at least 1.
    """

    about = About(
        "stochastic_beam", "K texts drawn without replacement; the first is plain decoding's", "arXiv:1903.06059",
        "own text", fields=("stochastic_beams",),
    )  # fmt: skip
    called = "a stochastic beam search"

    stochastic_beams: int = 4

    def __post_init__(self):
        if not isinstance(self.stochastic_beams, int) or self.stochastic_beams < 1:
            raise ValueError(f"stochastic_beams must be a whole number from 1 on, got {self.stochastic_beams}")

    @property
    def per_token(self) -> str:
        return f" of the best texts, a step of all {self.stochastic_beams} beams for each"

    def decoder(self, target: LM, mesh: Any) -> "StochasticBeamSearch":
        return StochasticBeamSearch(target, self, mesh)


@dataclasses.dataclass(frozen=True)
class StochasticBeamSearch(Search):
    """The decoder of `StochasticBeam`."""

    draws = True
    growing = Drawn
    ended = DrawnFound

    how: StochasticBeam

    @property
    def num_texts(self) -> int:
        return self.how.stochastic_beams

    @on_mesh
    def step(self, params: PyTree, state: SearchState) -> tuple[SearchState, None]:
        """One target pass over all texts: each that has not ended grows by one token."""
        live, length, count = ~state.done, state.prompt_length + state.stats.steps, self.num_texts
        logits, delta = self._read(params, state, length)
        old: Any = state.beams
        grows = (old.scores > -jnp.inf) & live[:, None]
        failed = (grows & jnp.isnan(logits).any(axis=2)).any(axis=1)
        sampler = self._sampler(state, old.tokens, length, live)
        own = parted(sampler.log_probs(merged(logits)[:, None]), count)[:, :, 0]
        own = jnp.where(grows[:, :, None], old.log_probs[:, :, None] + own, -jnp.inf)
        # the first text has plain decoding's noise, and the best text is the first until it has ended
        noise = gumbel_at(state.key, length[:, None], jnp.arange(own[0].size)[None, None]).reshape(own.shape)
        scores = self._noisy(own, noise, old.scores)

        batch, _, vocab = scores.shape
        top, flat = jax.lax.top_k(scores.reshape(batch, -1), count)
        parent, token = flat // vocab, flat % vocab
        here = jnp.arange(state.tokens.shape[1])[None, None] == length[:, None, None]
        texts = jnp.where(here, token[:, :, None], chosen(old.tokens, parent))
        eos = (token[:, :, None] == state.eos[:, None, :]).any(axis=2)
        ends = eos | (length + 1 >= state.limit)[:, None]
        new = DrawnFound(
            texts,
            jnp.broadcast_to(length[:, None] + 1, top.shape),
            top,
            jnp.where(eos, Finish.EOS, Finish.LENGTH).astype(jnp.int32),
            chosen(own.reshape(batch, -1), flat),
        )
        # Ended texts stay among the K as long as their score does; a place holds either one of these or a growing text.
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), state.found, new)
        at = jax.lax.top_k(both.scores, count)[1]
        kept = jax.tree.map(lambda x: chosen(x, at), both)
        is_over = chosen(jnp.concatenate([jnp.ones_like(ends), ends], axis=1), at)
        only = lambda where, x: jnp.where(where, x, -jnp.inf)
        beams = Drawn(kept.tokens, only(~is_over, kept.scores), only(~is_over, kept.log_probs))
        found = dataclasses.replace(kept, scores=only(is_over, kept.scores), log_probs=only(is_over, kept.log_probs))
        source = chosen(jnp.concatenate([jnp.zeros_like(parent), parent], axis=1), at)
        with jax.named_scope("fork"):
            cache = self._forked(state, delta, source, length, live)
        grows = (beams.scores > -jnp.inf).any(axis=1)
        return self._after(state, ~grows | failed, failed, beams, found, grows[:, None], cache), None

    def _noisy(self, own, noise, ceiling):
        """Scores `[B, K, V]` of continuations with log-probabilities `own`; the best one of each text has the text's score."""
        possible = own > -jnp.inf
        noisy = jnp.where(possible, own + noise, -jnp.inf)
        largest = noisy.max(axis=2, keepdims=True)
        finite = lambda x: jnp.where(possible, x, 0.0)
        bounded = lowered(finite(noisy), finite(largest), jnp.where(possible, ceiling[:, :, None], 0.0))
        return jnp.where(possible, bounded, -jnp.inf)
