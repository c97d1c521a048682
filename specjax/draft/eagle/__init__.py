"""EAGLE-1 and EAGLE-2: autoregression on the target's last feature (Li et al. 2024, arXiv:2401.15077, 2406.16858).

Both share weights. EAGLE-1 grows a static tree, EAGLE-2 a dynamic one: the expander decides.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, layers_config
from specjax.draft.head import draft_logits
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants
from specjax.models.kv import stack_past


@dataclasses.dataclass(frozen=True)
class Eagle(FeatureDrafter):
    """Drafts features with one decoder layer, and tokens from them with the target's own head.

    `params["draft"]` is EagleHead's, and optionally `head`: {`kernel` `[E, U]`} and `ids` `[U]` for fewer draft tokens.

    Attributes:
      expander: turns next-token distributions into a tree.
      config: the layer's `ModelConfig`; None for the target's own sizes.
    """

    about = (
        About(
            "eagle1",
            "autoregression on the target's features",
            "arXiv:2401.15077",
            expander="chain:length=3",
            paper="expander=static,tree=4 | 3 2x2 1 | 3 2x2 1 | 3 | 2",
            loads="head",
        ),
        About(
            "eagle2",
            "EAGLE-1's head with a dynamic tree",
            "arXiv:2406.16858",
            expander="top_k:k=2,depth=3,nodes=6",
            paper="expander=top_k,k=10,depth=8,nodes=60",
            loads="head",
        ),
    )
    tiles = True

    expander: Expander = Chain()
    config: Any = None

    any_width: ClassVar[bool] = False
    """Whether the head's width may differ from the target's."""

    @property
    def feature_wants(self) -> Wants:
        return Wants(final=True)

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    def cache_config(self):
        return self.config

    @property
    def head(self):
        """The head's module, as functions."""
        from specjax.draft.eagle.network import EagleHead

        return EagleHead(self.config)

    def bind(self, target):
        own = self.config or layers_config(target, "eagle")
        size = getattr(getattr(target, "config", None), "hidden_size", own.hidden_size)
        if own.hidden_size != size and not self.any_width:
            raise ValueError(f"the head reads features of width {own.hidden_size}, the target's are {size} wide")
        return dataclasses.replace(self, config=own, target=target)

    def init_params(self, key, target_params):
        return self.head.init(key)

    @classmethod
    def objective(cls) -> type[Any]:
        from specjax.draft.eagle.objective import TrainEagle

        return TrainEagle

    @classmethod
    def layout(cls):
        from specjax.draft.eagle.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return output.final

    def read(self, params, features, block, cache, past=None):
        return self.head(params["draft"], self.embed(params, block.tokens), features, block, cache, past)

    def propose(self, params, draft, view, sampler):
        def grow(carry, level):
            past, outputs = carry  # outputs of the last pair and of every scored node, [B, 1 + P, F]
            above = jnp.take_along_axis(outputs, level.parent[:, :, None] + 1, axis=1)
            positions = draft.length[:, None] + jnp.full(level.tokens.shape, level.depth - 1)
            block = Block(level.tokens, positions, draft.length, level.visible)
            h, delta = self.reread(params, above, block, draft.cache, past)
            carry = stack_past(past, delta), jnp.concatenate([outputs, h], axis=1)
            return carry, self.logits(params, h)

        last = draft.feature[:, None]
        first = self.logits(params, last)[:, 0]
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, first, grow, (None, last), sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def logits(self, params, h):
        """The distributions `[B, T, U]` of outputs `[B, T, F]`, by the draft's own head or the target's."""
        return draft_logits(self.target, params, h)

    def fed(self, h):
        """What the head reads of its own outputs `[B, T, F]` in the place of features: they predict these, `[B, T, E]`."""
        return h

    def reread(self, params, h, block, cache, past):
        """`read` over the head's own outputs `[B, T, F]` in place of the target's features."""
        return self.read(params, self.fed(h), block, cache, past)

    def hidden(self, carry):
        """The outputs `[B, F]` from which the last distribution was computed."""
        return carry[1][:, -1]
