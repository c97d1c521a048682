"""Drafts of a length that the load pays for: SmartSpec's goodput (Liu et al. 2024, arXiv:2406.14066)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.adaptive import Rule, judged

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Goodput(Rule):
    """Drafts as many tokens, in all rows alike, as promise most tokens a unit of time; none is plain decoding.

    Where row b accepts a token with chance a_b, k drafted tokens give `1 + a_b + ... + a_b^k` tokens, and goodput is their sum
    over the live rows, over the step's time for B rows that hold C tokens:

    `T(k) = k (draft_pass + draft_row B) + target_pass + target_context C + target_token B (k + 1)`

    From the paper: goodput, its maximum over k with 0 among them, a moving average of acceptance, and a time that is linear in
    the context and in the tokens of the batch. Ours: the terms of T; that B counts ended rows too, since a compiled step
    computes them all; that k is one of the drafter's rungs; and that a row's evidence fades while nothing is drafted, so
    that its rate goes back to the prior and drafting is tried again.

    The choice is made from committed tokens alone, inside the step; no clock is read. `python -m specjax.bench.goodput`
    measures the five times. Their unit does not matter; the defaults are an example, not a measurement.

    Attributes:
      draft_pass: of a draft pass.
      draft_row: of a draft pass, for each row.
      target_pass: of a target pass.
      target_context: for each token in the rows' caches.
      target_token: for each token that the target reads.
      decay: what past evidence is multiplied by at every step.
      prior: rate without evidence; it weighs as one token.
    """

    about = About("goodput", "all rows draft what pays at the load and their acceptance", "arXiv:2406.14066")

    draft_pass: float = 1.0
    draft_row: float = 0.1
    target_pass: float = 5.0
    target_context: float = 0.0
    target_token: float = 0.5
    decay: float = 0.9
    prior: float = 0.7

    together = True

    def __post_init__(self):
        times = (self.draft_pass, self.draft_row, self.target_pass, self.target_context, self.target_token)
        if (
            min(times) < 0
            or self.target_pass + self.target_token <= 0
            or not 0 <= self.decay < 1
            or not 0 < self.prior < 1
        ):
            raise ValueError(
                "goodput needs times of at least 0, one of target_pass and target_token above it, decay in [0, 1) and prior "
                f"in (0, 1), got {self}"
            )

    def init(self, batch):
        return jnp.zeros((batch,)), jnp.zeros((batch,))

    def start(self, params, state, view, length, hidden):
        hits, count = state
        best = self.best((hits + self.prior) / (count + 1), view.live, view.length.sum(), self.lengths(length))
        return lambda depth, confidence, carry: jnp.broadcast_to(depth < best, confidence.shape)

    def observe(self, state, tree, accepted, live):
        return judged(state, self.decay, tree, accepted, live)

    def time(self, drafted: Array, rows: int, context: Array) -> Array:
        """T of a step that drafts so many tokens in each of `rows` rows with `context` tokens in all."""
        draft = drafted * (self.draft_pass + self.draft_row * rows)
        return draft + self.target_pass + self.target_context * context + self.target_token * rows * (drafted + 1)

    def best(self, rate: Array, live: Array, context: Array, lengths: tuple[int, ...]) -> Array:
        """The one of `lengths` (ascending) of the highest goodput, a scalar; the shortest of equal ones.

        Args:
          rate: `[B]`, the chance of a drafted token to be accepted.
          live: `[B]` bool.
          context: scalar, tokens in all caches.
          lengths: to choose from.
        """
        powers = rate[:, None] ** jnp.arange(lengths[-1] + 1)[None]
        tokens = jnp.where(live[:, None], jnp.cumsum(powers, axis=1), 0).sum(axis=0)
        drafted = jnp.asarray(lengths)
        return drafted[jnp.argmax(tokens[drafted] / self.time(drafted, rate.shape[0], context))]
