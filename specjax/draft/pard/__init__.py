"""PARD: a draft model that drafts a whole chain in one pass, from mask tokens after the text (arXiv:2504.18583)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.model import ModelDraft, ModelDrafter
from specjax.draft.trim import TrimmedLM
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Pard(ModelDrafter):
    """Drafts with `params["draft"]`, the parameters of `lm`, which was trained to continue a text that ends in masks.

    A step reads the tokens that were committed since the last one, and D - 1 masks after them, for a tree of D levels.
    The output at the last token drafts the first level, and that at mask i the level i + 1. No distribution depends on
    drafted tokens, so any tree costs one pass. The cache keeps the committed tokens alone.

    Attributes:
      expander: turns the distributions into a tree. The default is the chain with which its authors measure.
      mask_id: the token that is read as a mask. It has a row in the table of `lm`.
    """

    about = About(
        "pard",
        "a small model that drafts all tokens in one pass, from mask tokens",
        "arXiv:2504.18583",
        expander="chain:length=12",
        loads="masked_draft",
    )
    tiles = True
    shared = True

    expander: Expander = Chain(12)
    mask_id: int = dataclasses.field(kw_only=True)

    hidden = None  # pyrefly: ignore[bad-override]
    """No distribution follows from a drafted one, so no rule can read the features between them."""

    def bind(self, target):
        rows = getattr(self.lm, "reads", self.lm.vocab_size)
        if not 0 <= self.mask_id < rows:
            raise ValueError(f"mask_id {self.mask_id} is outside the draft model's table of {rows} tokens")
        return super().bind(target)

    def fed(self, params: Any, draft: Any, block: Block, slots: Array) -> Block:
        """The block with what the model reads beside its tokens: here nothing.

        Args:
          params: the model's.
          draft: the state.
          block: the input.
          slots: `[B, T]`, the position of each token, and for a mask that of the last token.
        """
        return block

    def propose(self, params, draft, view, sampler):
        width = view.max_depth + 1
        at = draft.length[:, None] + jnp.arange(width + self.depth - 1)[None]
        text = jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        block = Block(jnp.where(at < view.length[:, None], text, self.mask_id), at, draft.length)
        block = self.fed(params["draft"], draft, block, jnp.minimum(at, view.length[:, None] - 1))
        output = self.lm(params["draft"], block, draft.cache, wants=Wants(final=True))
        new = view.length - draft.length
        # the write depends on the read, so that the cache is updated in place; see `ModelDrafter.propose`
        after = jnp.where(jnp.isnan(output.final[:, 0, 0]), 0, draft.length)
        delta = jax.tree.map(lambda x: x[:, :width], output.delta)
        cache = self.lm.commit(draft.cache, delta, None, after, new)
        levels = jnp.clip(new - 1, 0, width - 1)[:, None] + jnp.arange(self.depth)[None]
        final = jnp.take_along_axis(output.final, levels[:, :, None], axis=1)
        dists = self.lm.unembed(params["draft"], final)
        grow = lambda carry, level: (carry, dists[:, level.depth][:, None])
        if isinstance(self.lm, TrimmedLM):
            sampler = sampler.restricted(params["draft"]["ids"], self.lm.vocab_size)
        tree = self.expander(view.root, dists[:, 0], grow, None, sampler, keep_q=view.keep_q)
        return Proposal(tree, ModelDraft(cache, view.length))
