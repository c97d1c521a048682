"""Drafts whose length fits the load: SmartSpec's goodput (Liu et al. 2024, arXiv:2406.14066)."""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.adaptive import Rule, judged

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paying(Rule):
    """Drafts in all rows the number of tokens that gives the most for what a step costs; zero is plain decoding.

    If row b accepts a token with chance a_b, k drafted tokens give `1 + a_b + ... + a_b^k` tokens. Their sum over the live
    rows is divided by the step's cost. The choice is made inside the step, from committed tokens alone; no clock is read.
    A row's evidence fades while nothing is drafted, so that its rate goes back to the prior and drafting is tried again.

    Attributes:
      decay: the factor by which past evidence is multiplied at every step.
      prior: the rate without evidence; it weighs as one token.
    """

    of_rates = True
    together = True

    decay: float = 0.9
    prior: float = 0.7

    @abc.abstractmethod
    def cost(self, drafted: Array, rows: int, context: Array) -> Array:
        """Of a step that drafts `drafted` tokens in each of `rows` rows, which hold `context` tokens in all. Any unit."""

    def init(self, batch):
        return jnp.zeros((batch,)), jnp.zeros((batch,))

    def start(self, params, state, view, length, hidden):
        hits, count = state
        best = self.best((hits + self.prior) / (count + 1), view.live, view.length.sum(), self.lengths(length))
        return lambda depth, confidence, carry: jnp.broadcast_to(depth < best, confidence.shape)

    def observe(self, state, tree, accepted, live):
        return judged(state, self.decay, tree, accepted, live)

    def pays(self, rate: Array, live: Array, context: Array, lengths: tuple[int, ...]) -> Array:
        """For each of `lengths` (ascending), the tokens of a live row's step for what the step costs.

        Args:
          rate: `[B]`, the chance that a drafted token is accepted.
          live: `[B]` bool.
          context: scalar, tokens in all caches.
          lengths: to choose from.
        """
        drafted = jnp.asarray(lengths)
        powers = rate[:, None] ** jnp.arange(lengths[-1] + 1)[None]
        tokens = jnp.where(live[:, None], jnp.cumsum(powers, axis=1), 0).sum(axis=0)[drafted]
        return tokens / jnp.maximum(live.sum(), 1) / self.cost(drafted, rate.shape[0], context)

    def best(self, rate: Array, live: Array, context: Array, lengths: tuple[int, ...]) -> Array:
        """The one of `lengths` that `pays` most, a scalar; on a tie the shortest."""
        return jnp.asarray(lengths)[jnp.argmax(self.pays(rate, live, context, lengths))]


@dataclasses.dataclass(frozen=True)
class Goodput(Paying):
    """Drafts in all rows the number of tokens that promises the most tokens per unit of time; zero is plain decoding.

    The cost is the step's time for B rows that hold C tokens:

    `T(k) = k (draft_pass + draft_row B) + target_pass + target_context C + target_token B (k + 1)`

    From the paper: goodput, its maximum over k including 0, a moving average of acceptance, and a time that is linear
    in the context and in the tokens of the batch.

    Ours:

    - the terms of T;
    - B counts ended rows too, because a compiled step computes them all;
    - k is one of the drafter's rungs;
    - a row's evidence fades while nothing is drafted, so that its rate goes back to the prior and drafting is tried
      again.

    `python -m specjax.bench.goodput` measures the five times. Their unit does not matter; the defaults are an example, not
    a measurement.

    Attributes:
      draft_pass: of a draft pass.
      draft_row: of a draft pass, for each row.
      target_pass: of a target pass.
      target_context: for each token in the rows' caches.
      target_token: for each token that the target reads.
      decay: see `Paying`.
      prior: see `Paying`.
    """

    about = About("goodput", "all rows draft what pays at the load and their acceptance", "arXiv:2406.14066")

    draft_pass: float = 1.0
    draft_row: float = 0.1
    target_pass: float = 5.0
    target_context: float = 0.0
    target_token: float = 0.5

    def __post_init__(self):
        times = (self.draft_pass, self.draft_row, self.target_pass, self.target_context, self.target_token)
        if (
            min(times) < 0
            or self.target_pass + self.target_token <= 0
            or not 0 <= self.decay < 1
            or not 0 < self.prior < 1
        ):
            raise ValueError(
                "goodput needs times of at least 0, target_pass or target_token above 0, decay in [0, 1) and prior "
                f"in (0, 1), got {self}"
            )

    def cost(self, drafted, rows, context):
        """T."""
        draft = drafted * (self.draft_pass + self.draft_row * rows)
        return draft + self.target_pass + self.target_context * context + self.target_token * rows * (drafted + 1)
