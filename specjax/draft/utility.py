"""Drafts that pay in tokens per step for what a step costs more, also with experts: Cascade's utility (arXiv:2506.20675)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.goodput import Paying

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Utility(Paying):
    """Drafts in all rows the number of tokens with the highest utility, and none where no utility exceeds 1.

    The utility of k drafted tokens is `tokens(k) / (cost(k) / cost(0))`: the tokens of a live row's step, for the
    cost of the step in steps without a draft. In a model with experts, a step with more tokens reads more experts:

    `cost(k) = draft k + token B k + (1 - share) + share D(B (k + 1)) / D(B)`

    for B rows. Of X experts a token uses c. `D(n) = X (1 - (1 - c / X)^m)` is how many distinct ones n tokens use, with
    `m = 1 + (1 - overlap) (n - 1)`, if routing is even and tokens are routed independently. At `overlap=1` all tokens
    use the same ones, and the rule is `goodput`'s. A model without experts has `D(n) / D(B) = 1`.

    From the paper: utility, its parts, its bound of 1, and experts as what makes verifying dear. Ours: the paper times
    steps and counts experts as it runs, in phases of tests; here the cost is this formula, since a step reads no clock
    and a target does not tell a drafter which experts it used. Rows decide together, since a step's rows share experts.
    Tokens are expected as in `goodput`: while nothing is drafted, a row's evidence fades, so drafting is tried again.

    Attributes:
      draft: the cost of a draft pass, in plain steps.
      token: of one more token of a row, without its experts.
      share: the part of a plain step that reads experts.
      overlap: the part of a token's experts that the other tokens of the step use anyway, in [0, 1].
      experts: X; 0 for the target's own.
      chosen: c; 0 for the target's own.
      decay: see `Paying`.
      prior: see `Paying`.
    """

    about = About("utility", "all rows draft what pays for the experts that a step reads", "arXiv:2506.20675")

    draft: float = 0.2
    token: float = 0.01
    share: float = 0.6
    overlap: float = 0.0
    experts: int = 0
    chosen: int = 0

    def __post_init__(self):
        parts = 0 <= self.share <= 1 and 0 <= self.overlap <= 1 and min(self.draft, self.token) >= 0
        both = 0 < self.chosen <= self.experts or self.chosen == self.experts == 0
        if not parts or not both or not 0 <= self.decay < 1 or not 0 < self.prior < 1:
            raise ValueError(
                "utility needs draft and token of at least 0, share and overlap in [0, 1], experts and chosen both or "
                "neither, no more chosen than experts, decay in [0, 1) and prior in (0, 1), "
                f"got {self}"
            )

    def for_target(self, target: Any) -> "Utility":
        """This rule with the target's experts, if it has any and none are named."""
        from specjax.models.experts import ExpertsConfig  # flax is slow to import

        layers = getattr(getattr(target, "config", None), "layers", ())
        found = next((layer.feed for layer in layers if isinstance(layer.feed, ExpertsConfig)), None)
        if self.experts or found is None:
            return self
        return dataclasses.replace(self, experts=found.num_experts, chosen=found.main)

    def distinct(self, tokens: Array) -> Array:
        """D: how many distinct experts this many tokens are expected to use; 1 without experts."""
        if not self.experts or not self.chosen:
            return jnp.ones_like(tokens, jnp.float32)
        apart = 1.0 + (1.0 - self.overlap) * (tokens - 1)
        return self.experts * (1 - (1 - self.chosen / self.experts) ** apart)

    def cost(self, drafted, rows, context=None):
        """`cost(k)`, in steps that draft nothing; that of these is 1. It does not depend on the context."""
        read = self.distinct(rows * (drafted + 1)) / self.distinct(jnp.asarray(rows))
        return (self.draft + self.token * rows) * drafted + 1.0 - self.share + self.share * read
