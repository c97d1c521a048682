"""Sequential Monte Carlo under a constraint (Loula et al. 2025, arXiv:2504.13139): particles with importance weights.

In the shape descriptions `B` denotes rows (prompts), `K` particles of a row, `L` the text buffer.
"""

import dataclasses
import functools
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import LM
from specjax.sampling.noise import CHOICE, GUMBEL, REPEATS, RESAMPLE, RETRY, gumbel_at, uniform
from specjax.sampling.warp import allowed, asks, tried, unrestricted
from specjax.search.awrs import weighted_draw
from specjax.search.base import Beams, Found, Search, SearchSettings, SearchState
from specjax.search.fork import chosen, merged, parted, spread
from specjax.sharding.ambient import on_mesh
from specjax.state import Finish

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Particles(Beams):
    """The particles of a row, those that have ended too; their `scores` are logarithms of weights, -inf of dead ones.

    Attributes:
      length: `[B, K]` int32, of a particle that has ended.
      finish: `[B, K]` int32, a `Finish` value.
    """

    length: Array
    finish: Array

    @classmethod
    def of(cls, prompts: Array, count: int, groups: int) -> Self:
        zeros = lambda: jnp.zeros((prompts.shape[0], count), jnp.int32)
        return cls(spread(prompts, count), zeros().astype(jnp.float32), zeros(), zeros() + Finish.RUNNING)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted(Found):
    """The particles of a row at its end. Their `scores` are logarithms of weights with Gumbel noise: the best is a draw.

    Attributes:
      log_weights: `[B, K]` float32. With the weights, the texts are a sample of the aligned distribution.
      log_mean: `[B, K]` float32, the logarithm of the mean weight, the same for all texts of a row. The mean itself is an
        unbiased estimate of the probability that a text is in the language.
    """

    log_weights: Array
    log_mean: Array

    @property
    def worth(self) -> Array:
        return self.log_weights

    @property
    def log_evidence(self) -> Array:
        return self.log_mean[:, 0]

    @classmethod
    def nothing(cls, batch: int, count: int, capacity: int) -> Self:
        none = lambda: jnp.zeros((batch, count)) - jnp.inf
        return cls(**vars(Found.nothing(batch, count, capacity)), log_weights=none(), log_mean=none())


@dataclasses.dataclass(frozen=True)
class Smc(SearchSettings):
    """K particles, drawn token by token among what a constraint allows, with weights for what that changes.

    The distribution that it approaches, as K grows, is the model's own given that the text is in the language. The model's
    own is that after all warpers except the constraint, cut at the row's limit. A particle's weight is multiplied in each
    step by the mass of all allowed tokens, or by an unbiased estimate of it (`specjax.search.awrs`). If weights become
    uneven, particles are resampled (systematically). The row's text is one of the particles, drawn by weight.

    Attributes:
      particles: K.
      resample_below: the share of K below which the effective number of particles must fall to be resampled; 0: never.
      weights: "exact": all tokens are checked. "awrs": only tokens that are tried. "auto": exact for tables on the
        device, awrs for what a host checks.
      tries: the most tokens that awrs tries at a place. With fewer, more particles die, and weights stay unbiased. With
        the whole vocabulary, peaked distributions have weights of less variance.

    Raises:
      ValueError: for numbers out of range.
    """

    about = About(
        "smc", "K weighted texts under a constraint; one is drawn by weight", "arXiv:2504.13139, arXiv:2504.05410",
        "own text", fields=("particles", "resample_below", "weights", "tries"),
    )  # fmt: skip
    called = "sequential Monte Carlo"
    aligns = "consistent"

    particles: int = 10
    resample_below: float = 0.5
    weights: Literal["auto", "exact", "awrs"] = "auto"
    tries: int = 1024

    def __post_init__(self):
        if not all(isinstance(count, int) and count >= 1 for count in (self.particles, self.tries)):
            raise ValueError(
                f"particles and tries must be whole numbers from 1 on, got {self.particles} and {self.tries}"
            )
        if not 0 <= self.resample_below <= 1:
            raise ValueError(f"resample_below must be in [0, 1], got {self.resample_below}")
        if self.weights not in ("auto", "exact", "awrs"):
            raise ValueError(f'weights must be "auto", "exact" or "awrs", got {self.weights!r}')

    @property
    def per_token(self) -> str:
        return f" of the drawn texts, a step of all {self.particles} particles for each"

    def decoder(self, target: LM, mesh: Any) -> "SmcSearch":
        return SmcSearch(target, self, mesh)


@dataclasses.dataclass(frozen=True)
class SmcSearch(Search):
    """The decoder of `Smc`."""

    draws = True
    growing = Particles
    ended = Weighted

    how: Smc

    @property
    def obeys(self) -> bool:
        """See `Decoder.obeys`."""
        return True

    @property
    def num_texts(self) -> int:
        return self.how.particles

    @on_mesh
    def step(self, params: PyTree, state: SearchState) -> tuple[SearchState, None]:
        """One target pass over all particles: each that has not ended grows by one token."""
        live, length = ~state.done, state.prompt_length + state.stats.steps
        logits, delta = self._read(params, state, length)
        old: Any = state.beams
        grows = (old.finish == Finish.RUNNING) & (old.scores > -jnp.inf) & live[:, None]
        failed = (grows & jnp.isnan(logits).any(axis=2)).any(axis=1)
        token, gained = self._drawn(state, logits, length, grows)
        here = (jnp.arange(state.tokens.shape[1])[None, None] == length[:, None, None]) & grows[:, :, None]
        eos = (token[:, :, None] == state.eos[:, None, :]).any(axis=2)
        at_limit = jnp.where(length + 1 >= state.limit, Finish.LENGTH, Finish.RUNNING)[:, None]
        new = Particles(
            jnp.where(here, token[:, :, None], old.tokens),
            jnp.where(grows, old.scores + gained, old.scores),
            jnp.where(grows, length[:, None] + 1, old.length),
            jnp.where(grows, jnp.where(eos, Finish.EOS, at_limit), old.finish).astype(jnp.int32),
        )
        over = ((new.finish != Finish.RUNNING) | (new.scores == -jnp.inf)).all(axis=1) | failed
        source, scores, moves = self._resampled(state, new.scores, length, live & ~over)
        beams = dataclasses.replace(jax.tree.map(lambda x: chosen(x, source), new), scores=scores)
        with jax.named_scope("fork"):
            cache = self._forked(state, delta, source, length, live, moves)
        found = self._ended(state, beams)
        return self._after(state, over, failed, beams, found, ~over[:, None], cache), None

    def _drawn(self, state, logits, length, grows) -> tuple[Array, Array]:
        """The next token of every particle that `grows`, and the logarithm of the factor of its weight, `[B, K]` each."""
        sampler = self._sampler(state, state.beams.tokens, length, ~state.done)
        sampler = dataclasses.replace(sampler, live=merged(grows))
        text, count, vocab = sampler.text(None), self.num_texts, logits.shape[-1]
        free = dataclasses.replace(sampler, params=unrestricted(sampler.params))
        own = free.log_probs(merged(logits)[:, None])[:, 0]
        ids = jnp.arange(count * vocab)[None, None]
        noisy = lambda purpose: gumbel_at(state.key, length[:, None], ids, purpose).reshape(own.shape)
        asked = asks(sampler.params)

        def exact(text):
            left = jnp.where(allowed(sampler.params, text, vocab)[:, 0], own, -jnp.inf)
            return jnp.argmax(left + noisy(GUMBEL), axis=1), jax.nn.logsumexp(left, axis=1)

        def awrs():
            shape = count, 2, min(self.how.tries, vocab)
            coins = merged(uniform(state.key, length[:, None], REPEATS, shape)[:, 0])
            check = functools.partial(tried, sampler.params, text, vocab)
            return weighted_draw(own, jnp.stack([noisy(GUMBEL), noisy(RETRY)]), coins, check)

        if self.how.weights == "awrs":
            token, gained = awrs()
        elif self.how.weights == "exact" or asked is None:
            token, gained = exact(text)
        else:  # as in a draft, what a host decides is left open
            by_table, by_host = exact(dataclasses.replace(text, drafting=True)), awrs()
            token, gained = (jnp.where(asked, a, b) for a, b in zip(by_host, by_table, strict=True))
        return parted(token, count), parted(gained, count)

    def _resampled(self, state, scores, length, live) -> tuple[Array, Array, Array]:
        """Which particle each one continues `[B, K]`, the new weights, and the rows in which that changes `[B]`."""
        count = scores.shape[1]
        total = jax.nn.logsumexp(scores, axis=1, keepdims=True)
        share = jnp.exp(scores - jnp.where(total > -jnp.inf, total, 0.0))
        effective = 1 / jnp.maximum((share**2).sum(axis=1), 1e-30)
        moves = live & (effective < self.how.resample_below * count)
        ends = jnp.cumsum(share, axis=1)
        at = (uniform(state.key, length[:, None], RESAMPLE) + jnp.arange(count)[None]) / count * ends[:, -1:]
        last = (ends < ends[:, -1:]).sum(axis=1, keepdims=True)  # that has a weight, should a place be rounded up
        source = jnp.minimum((ends[:, None, :] <= at[:, :, None]).sum(axis=2), last)
        source = jnp.where(moves[:, None], source, jnp.arange(count)[None])
        return source, jnp.where(moves[:, None], total - jnp.log(count), scores), moves

    def _ended(self, state, beams) -> Weighted:
        """The particles as texts, those that have ended."""
        ended, weights = beams.finish != Finish.RUNNING, beams.scores
        each = jnp.arange(weights.shape[1])[None, None]
        noise = gumbel_at(state.key, state.prompt_length[:, None], each, CHOICE)[:, 0]
        evidence = jax.nn.logsumexp(weights, axis=1, keepdims=True) - jnp.log(weights.shape[1])
        return Weighted(
            beams.tokens,
            beams.length,
            jnp.where(ended, weights + noise, -jnp.inf),
            beams.finish,
            jnp.where(ended, weights, -jnp.inf),
            jnp.broadcast_to(evidence, weights.shape),
        )
