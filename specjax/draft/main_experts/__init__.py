"""The target drafts for itself with fewer of its experts (the main experts of He et al. 2025, arXiv:2503.00634)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, TreeDrafter
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants
from specjax.models.kv import stack_past


@dataclasses.dataclass(frozen=True)
class MainExperts(TreeDrafter):
    """A mixture of experts as its own draft model, where each token is computed by its best experts alone.

    Drafts read the target's own cache, as it is, and what they add to it lives for one step. A pass for one token reads
    `keep` experts of a layer, and all other weights. So it pays where experts are most of what a step reads: for few rows.

    As published, the kept experts have the weights that they have among all of the token's, and the others' weights are
    lost. Where a router divides weights by their sum, this makes a layer's output smaller than the target's. With
    `renormalised`, that sum is over the kept ones.

    Vectors may stand for the experts that are left out (`specjax.models.compressed`). They are parameters of the drafter,
    which `specjax train compressed_experts` trains. Vectors of ones are the same as none.

    Attributes:
      keep: how many experts a token has in a draft, fewer than in the target. 0: half of the target's, as published, rounded
        up.
      renormalised: whether a router that divides weights by their sum does so for the kept experts alone.
      expander: turns next-token distributions into a tree.
      vectors: whether `params["draft"]` holds vectors, as `specjax.models.routing.ones` makes them.
      target: with those experts; filled in by `bind`.
    """

    about = About(
        "main_experts",
        "the target itself, with fewer experts for each token",
        "arXiv:2503.00634",
        fields=("keep", "renormalised"),
        expander="chain:length=3",
        loads="vectors",
    )

    keep: int = 0
    renormalised: bool = False
    expander: Expander = Chain(3)
    vectors: bool = False
    target: Any = None

    @property
    def needs_params(self):
        return self.vectors

    def bind(self, target):
        from specjax.models import routing  # flax is slow to import

        if self.vectors and self.renormalised:
            raise ValueError("main_experts: vectors are for weights as published: leave renormalised or vectors out")
        most = min(experts.main for experts in routing.experts_of(target, "main_experts"))
        keep = self.keep or -(-most // 2)
        few = (routing.compressed if self.vectors else routing.main_alone)(target, keep, "main_experts")
        if self.renormalised:
            few = routing.routed(target, 1, keep, "main_experts")
        return dataclasses.replace(self, target=few)

    def propose(self, params, draft, view, sampler):
        from specjax.models.routing import joined

        weights = joined(params["target"], params["draft"]) if self.vectors else params["target"]
        length = view.length - 1  # the root has no slot yet
        wants = Wants(logits=True, final=True)
        output = self.target(weights, Block(view.root[:, None], length[:, None], length), view.cache, wants=wants)

        def grow(carry, level):
            past, _ = carry
            positions = length[:, None] + jnp.full(level.tokens.shape, level.depth)
            visible = jnp.pad(level.visible, ((0, 0), (0, 0), (1, 0)), constant_values=True)  # all see the root
            block = Block(level.tokens, positions, length, visible)
            output = self.target(weights, block, view.cache, wants=wants, past=past)
            return (stack_past(past, output.delta), output.final), output.logits

        carry = output.delta, output.final
        tree = self.expander(view.root, output.logits[:, 0], grow, carry, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def hidden(self, carry):
        """The features `[B, E]` from which the last distribution was computed."""
        return carry[1][:, -1]
