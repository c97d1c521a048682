"""Who drafts in any-subset speculative decoding: the model itself, or n-grams of the known text (arXiv:2504.20456).

In the shape descriptions `B` denotes rows, `L` positions, `K` drafts of a round, `V` the vocabulary.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from specjax.about import About, Named
from specjax.sampling.sampler import best
from specjax.sampling.warp import warp

Array = jax.Array
PyTree = Any


class AnySubset(Protocol):
    """A model of the distribution of every position given any others. Hashable."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, params: PyTree, tokens: Array, sees: Array, at: Array) -> Array:
        """Logits `[B, K, V]` of the positions `at` `[B, K]`.

        Each position i is predicted from the tokens j of `[B, L]` for which `sees[b, i, j]` (`[B, L, L]`) is true.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known when a round begins.

    Attributes:
      tokens: `[B, L]` int32, garbage where nothing is known.
      before: `[B, L, L]` bool, which positions each sees once all before it are known.
      there: `[B, L]` bool, which positions are known.
    """

    tokens: Array
    before: Array
    there: Array


@dataclasses.dataclass(frozen=True)
class Round:
    """What a round drafts from.

    Attributes:
      dist: the model: from tokens `[B, L]`, what each position sees `[B, L, L]` and positions `[B, K]` to log-probabilities
        `[B, K, V]` after the rows' warpers.
      known: what is known.
      at: `[B, K]` int32, the positions to draft, in their order.
      noise: `[B, K, V]` float32, the positions' noise; 0 in greedy rows.
    """

    dist: Callable[[Array, Array, Array], Array]
    known: Known
    at: Array
    noise: Array


class AnySubsetDraft(abc.ABC):
    """Drafts the next positions of a round. Implementations are frozen dataclasses: static and hashable."""

    about: ClassVar[Named] = None
    """Its names in a line of text."""

    passes: ClassVar[int]
    """How many passes of the model a round's drafts take."""

    sure: ClassVar[bool]
    """Whether the first draft is the model's own token, which needs no verification."""

    @abc.abstractmethod
    def __call__(self, asked: Round) -> tuple[Array, Array]:
        """The drafts `[B, K]` int32, -1 where there is none, and the log-probabilities `[B, K, V]` that each is drawn from.

        A draft is `argmax(log q + noise)`, so that it is a draw from q, and often the token that the same noise chooses
        in the verification.
        """


@dataclasses.dataclass(frozen=True)
class SelfDraft(AnySubsetDraft):
    """The model drafts all positions in one pass, each from the known tokens alone, apart from the others.

    The first draft's distribution is that of the verification, so it is always accepted, and a round of two passes
    yields at least two tokens.
    """

    about = About("self", "the model drafts from the known tokens, in a pass of its own", "arXiv:2504.20456")

    passes = 1
    sure = True

    def __call__(self, asked: Round) -> tuple[Array, Array]:
        known = asked.known
        q = asked.dist(known.tokens, known.before & known.there[:, None], asked.at)
        return best(q + asked.noise), q


@dataclasses.dataclass(frozen=True)
class ContextNgram(AnySubsetDraft):
    """Drafts by bigrams of the known tokens, on both sides of a gap; no pass of the model.

    A token is drawn in proportion to how often it follows the token before it, over all neighbours that are both known.
    Where that token is followed by none, it is drawn in proportion to its count among all known tokens. The token before
    it may be the draft before it. Drafts themselves are not counted.

    The original drafts with the model where the text's first position is open, which has no token before it; here that
    position is drawn by counts.
    """

    about = About(
        "context_ngram", "bigrams of the known tokens on both sides draft, without a pass", "arXiv:2504.20456"
    )

    passes = 0
    sure = False

    def __call__(self, asked: Round) -> tuple[Array, Array]:
        known, at = asked.known, asked.at
        tokens, there = known.tokens, known.there
        pairs = there[:, :-1] & there[:, 1:]
        spread = jax.vmap(lambda ids, weights: jnp.zeros(asked.noise.shape[2:], jnp.float32).at[ids].add(weights))
        alone = spread(tokens, there.astype(jnp.float32))
        before = jnp.take_along_axis(jnp.where(there, tokens, -1), jnp.maximum(at - 1, 0), axis=1)
        before = jnp.where(at > 0, before, -1)
        follows_draft = jnp.pad(at[:, 1:] == at[:, :-1] + 1, ((0, 0), (1, 0)))

        def draft(last, each):
            token, follows, noise = each
            token = jnp.where(follows & (token < 0), last, token)
            counted = pairs & (tokens[:, :-1] == token[:, None])
            after = spread(tokens[:, 1:], counted.astype(jnp.float32))
            counts = jnp.where(jnp.any(counted, axis=1)[:, None], after, alone)
            total = counts.sum(axis=1, keepdims=True)
            q = jnp.log(counts / jnp.maximum(total, 1))
            new = jnp.where(total[:, 0] > 0, best(q + noise), -1).astype(jnp.int32)
            return new, (new, q)

        by_draft = lambda x: jnp.moveaxis(x, 1, 0)
        none = jnp.full(at.shape[:1], -1, jnp.int32)
        _, found = jax.lax.scan(draft, none, tuple(map(by_draft, (before, follows_draft, asked.noise))))
        return by_draft(found[0]), by_draft(found[1])


def distribution(
    lm: AnySubset, params: PyTree, tokens: Array, sees: Array, at: Array, sampling: Any, live: Array, mask_id: int
) -> Array:
    """Log-probabilities `[B, K, V]` of the positions `at`, after the rows' warpers; one-hot in greedy rows.

    Args:
      lm: the model.
      params: its parameters.
      tokens: see `AnySubset`.
      sees: see `AnySubset`.
      at: see `AnySubset`.
      sampling: the rows' sampling parameters.
      live: `[B]` bool, rows that are not finished.
      mask_id: a token that is never written; -1: there is none.
    """
    logits = lm(params, tokens, sees, at)
    logits = logits if mask_id < 0 else logits.at[:, :, mask_id].set(-jnp.inf)
    scores = warp(logits, sampling, live)
    greedy = (sampling.temperature == 0)[:, None, None]
    ids = jnp.arange(scores.shape[2])[None, None]
    one = jnp.where(ids == best(scores)[:, :, None], 0.0, -jnp.inf)
    return jnp.where(greedy, one, jax.nn.log_softmax(scores, axis=-1))
