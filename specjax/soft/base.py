"""The base of mixers: from a token's distribution to the mixture of tokens that a thinking row reads next.

In the shape descriptions `B` denotes rows, `n` tokens of a mixture, `V` the vocabulary.
"""

import abc
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.pretty import Pretty
from specjax.sampling import Sampler

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixed(Pretty):
    """The mixture that a step makes from every row's distribution.

    Attributes:
      ids: `[B, n]` int32, different tokens, the heaviest first.
      weights: `[B, n]` float32, which sum to 1.
      token: `[B]` int32, the token that a thinking row records: the heaviest; -1 if no score is finite.
    """

    ids: Array
    weights: Array
    token: Array


@dataclasses.dataclass(frozen=True)
class Mixer(abc.ABC):
    """A rule of soft thinking: the tokens and weights of a row's next input, and when it has thought enough.

    Implementations are frozen dataclasses. A greedy row's distribution is one token, and so is its mixture.

    Attributes:
      n: tokens of a mixture, at most V.
      cold_stop: in nats; thinking ends when the model's own distribution has had less entropy for `cold_steps` tokens
        in a row. 0: it does not end thinking.
      cold_steps: how many.

    Raises:
      ValueError: for numbers out of range.
    """

    about: ClassVar[Named] = None
    """Its names in the registry, and what its text guarantees compared with plain decoding's."""

    n: int = 8
    cold_stop: float = 0.0
    cold_steps: int = 256

    def __post_init__(self):
        if not all(isinstance(count, int) and count >= 1 for count in (self.n, self.cold_steps)):
            raise ValueError(
                f"soft thinking needs n and cold_steps to be whole numbers from 1 on, got {self.n} and {self.cold_steps}"
            )
        if not 0 <= self.cold_stop < math.inf:
            raise ValueError(f"cold_stop must be a finite number of nats >= 0, got {self.cold_stop}")

    @abc.abstractmethod
    def mix(self, logits: Array, sampler: Sampler) -> Mixed:
        """The next input, from raw logits `[B, 1, V]`."""

    def plain(self, logits: Array, sampler: Sampler, mixed: Mixed) -> Array:
        """Plain decoding's token `[B]` at the same place; -1 if no score is finite."""
        return sampler.draw(logits, 0)[:, 0]


def heaviest(ids: Array, weights: Array, finite: Array) -> Mixed:
    """A mixture of tokens `[B, n]` in the order of their weights; a row that is not `finite` `[B]` fails."""
    order = jnp.argsort(-weights, axis=1, stable=True)
    ids, weights = (jnp.take_along_axis(x, order, axis=1) for x in (ids, weights))
    return Mixed(ids, weights, jnp.where(finite, ids[:, 0], -1))


def likeliest(logits: Array, sampler: Sampler, n: int) -> tuple[Array, Array, Array]:
    """The n likeliest tokens `[B, n]` of every row's distribution after all warpers.

    Also their renormalised log-probabilities `[B, n]`, and whether these are finite `[B]`.
    """
    log_probs = sampler.log_probs(logits)[:, 0]
    top, ids = jax.lax.top_k(log_probs, min(n, log_probs.shape[1]))
    # greedy rows' distribution comes from a comparison, which hides NaN
    finite = jnp.isfinite(top[:, 0]) & ~jnp.isnan(logits).any(axis=(1, 2))
    return ids, jax.nn.log_softmax(top, axis=1), finite
