"""Gumiho: two decoder layers draft the first two tokens, and an MLP each later one (Li et al. 2025, arXiv:2503.10135)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.eagle import Eagle
from specjax.draft.feature import layers_config
from specjax.expand import Chain, Expander
from specjax.lm import Block
from specjax.models.kv import stack_past

SERIAL = 2
"""The tokens that the decoder layers draft, which the MLPs read."""


@dataclasses.dataclass(frozen=True)
class Gumiho(Eagle):
    """EAGLE's draft for two tokens. Their pairs of token and feature are the input of every MLP.

    MLP m predicts the feature after token 2 + m of a path. It sees no token in between, so nodes of a level share one
    distribution if their paths begin with the same two tokens. `params["draft"]` is GumihoHead's, and optionally `head`
    and `ids`, as in EAGLE.

    Attributes:
      expander: see Eagle; no deeper than `2 + mlps`.
      layers: decoder layers, if `config` does not say it.
      mlps: how many.
    """

    about = About(
        "gumiho",
        "EAGLE for the first two tokens, and an MLP for each later one",
        "arXiv:2503.10135",
        expander="top_k:k=2,depth=4,nodes=8",
        paper="expander=top_k,k=14,depth=7,nodes=64",
        loads="head",
    )
    tiles = True

    expander: Expander = Chain()
    layers: int = 2
    mlps: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.layers < 1 or self.mlps < 1:
            raise ValueError(f"gumiho: layers and mlps must be at least 1, got layers={self.layers}, mlps={self.mlps}")
        if self.expander.depth > SERIAL + self.mlps:
            raise ValueError(
                f"gumiho: {self.mlps} MLPs draft {SERIAL + self.mlps} tokens, and the tree is {self.expander.depth} deep: "
                f"choose depth={SERIAL + self.mlps} of it, or more mlps"
            )

    @property
    def head(self):
        from specjax.draft.gumiho.network import GumihoHead

        return GumihoHead(self.config, mlps=self.mlps)

    def bind(self, target):
        own = self.config or layers_config(target, "gumiho", self.layers)
        return dataclasses.replace(super().bind(target), config=own, layers=own.num_hidden_layers)

    @classmethod
    def objective(cls):
        from specjax.draft.gumiho.objective import TrainGumiho

        return TrainGumiho

    @classmethod
    def layout(cls):
        from specjax.draft.gumiho.published import LAYOUT

        return LAYOUT

    def propose(self, params, draft, view, sampler):
        own = params["draft"]

        def grow(carry, level):
            past, outputs, pairs = carry  # of the last pair and of every scored node, [B, 1 + P, E] and [B, 1 + P, 2 E]
            above = level.parent[:, :, None] + 1
            features, read = (jnp.take_along_axis(x, above, axis=1) for x in (outputs, pairs))
            if level.depth <= SERIAL:
                pair = self.head.joined(own, self.embed(params, level.tokens), features)
                read = jnp.concatenate([read[..., pair.shape[-1] :], pair], axis=-1)
            if level.depth < SERIAL:
                positions = draft.length[:, None] + jnp.full(level.tokens.shape, level.depth - 1)
                block = Block(level.tokens, positions, draft.length, level.visible)
                h, delta = self.read(params, features, block, draft.cache, past)
                past = stack_past(past, delta)
            else:
                h = self.head.guess(own, level.depth - SERIAL, read)
            carry = past, jnp.concatenate([outputs, h], axis=1), jnp.concatenate([pairs, read], axis=1)
            return carry, self.logits(params, h)

        last = draft.feature[:, None]
        pairs = jnp.zeros((*last.shape[:2], SERIAL * last.shape[2]), last.dtype)
        first = self.logits(params, last)[:, 0]
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, first, grow, (None, last, pairs), sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)
