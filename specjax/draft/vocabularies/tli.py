"""A draft model of another vocabulary, over the tokens that both have (token-level intersection, arXiv:2502.05202)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import View
from specjax.draft.model import ModelDrafter
from specjax.draft.vocabularies.shared import OtherTokens
from specjax.expand import Chain, Expander

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Tli(OtherTokens, ModelDrafter):
    """Drafts with a `SharedLM` through any expander, from a text of the draft model's own tokens.

    Drafts are tokens that both models have, drawn with the target's noise from the draft model's distribution
    restricted to them. So every verifier judges them as those of a model of the target's vocabulary.

    Attributes:
      lm: the draft model.
      expander: turns its next-token distributions into a tree.
    """

    about = About(
        "tli",
        "a small model of another vocabulary, over the tokens that both have",
        "arXiv:2502.05202",
        expander="chain",
        loads="other_model",
    )

    expander: Expander = Chain()

    def bind(self, target):
        self.check(target)
        return super().bind(target)

    def begun(self, params: Any, draft: Any, view: View) -> tuple[Any, Array, Array]:
        draft, final = self.caught(params, draft, view)
        return draft, self.lm.unembed(params["draft"], final)[:, 0], final

    def propose(self, params, draft, view, sampler):
        proposal = super().propose(params, draft, view, sampler)
        tree = proposal.tree
        kept = ~proposal.draft.cut[:, None] | (jnp.arange(tree.nodes)[None] == 0)
        return dataclasses.replace(proposal, tree=dataclasses.replace(tree, valid=tree.valid & kept))

    def trimmed(self, params, target_params, ids):
        raise ValueError("a draft over the tokens that both models have is not trimmed further: leave trim out")
