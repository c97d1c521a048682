"""The common part of Clover and Clover-2: drafted tokens are mixed into a recurrent state without attention to the tree."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, head_config, layers_config
from specjax.draft.head import draft_logits
from specjax.expand import Chain, Expander
from specjax.lm import Wants
from specjax.models.few_bits import is_quantised, plain
from specjax.models.kv_heads import merged


@dataclasses.dataclass(frozen=True)
class RegressiveDrafter(FeatureDrafter):
    """Decoder layers over the target's last layer before the final norm, then one state for every drafted token.

    Attributes:
      expander: turns next-token distributions into a tree.
      layers: decoder layers before the heads.
      config: the layers' `ModelConfig`; None for the target's own sizes.
    """

    expander: Expander = Chain()
    layers: int = 1
    config: Any = None

    @property
    def name(self) -> str:
        """Its name in errors."""
        return type(self).__name__.lower()

    @property
    def feature_wants(self) -> Wants:
        return Wants(hidden=(self.target.num_layers - 1,))

    @property
    def cache_config(self):
        return self.config or layers_config(self.target, self.name, self.layers)

    @property
    def feature_size(self) -> int:
        return self.cache_config.hidden_size

    @property
    @abc.abstractmethod
    def head(self) -> Any:
        """The modules, as functions."""

    def bind(self, target):
        if self.layers < 1:
            raise ValueError(f"{self.name}: a head has at least one layer, got layers={self.layers}")
        head_config(target, self.name)
        return dataclasses.replace(self, target=target)

    def of_target(self, target_params: Any) -> dict[str, Any]:
        """The parameters that start as the target's: the decoder layers as its last one, and `head_norm` as its final norm or,
        without one, as that layer's last.
        """
        target_params = merged(target_params, self.target.config, self.target.kv_copies)
        last = target_params["layers"][self.target.num_layers - 1]
        last = jax.tree.map(plain, last, is_leaf=is_quantised)
        norm = target_params.get("norm", last.get("mlp_norm"))
        return {"layers": dict.fromkeys(range(self.layers), last), "head_norm": norm}

    def init_params(self, key, target_params):
        """Decoder layers and norms start as the target's, see `of_target`."""
        return self.head.init(key) | self.of_target(target_params)

    def features(self, output):
        return output.hidden[self.target.num_layers - 1]

    def embed(self, params, tokens):
        """As in any head; its table is not trained."""
        return jax.lax.stop_gradient(super().embed(params, tokens))

    def read(self, params, features, block, cache, past=None):
        embeds = self.embed(params, block.tokens)
        return self.head.context(params["draft"], embeds, features, block, cache)

    def propose(self, params, draft, view, sampler):
        own = params["draft"]

        def grow(states, level):  # states of the last pair and of every scored node, [B, 1 + P, E]
            above = jnp.take_along_axis(states, level.parent[:, :, None] + 1, axis=1)
            embeds = self.embed(params, level.tokens)
            h = self.head.advance(own, above, embeds)
            return jnp.concatenate([states, h], axis=1), self.dist(params, h, embeds, level.depth)

        last = draft.feature[:, None]
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, self.dist(params, last, None, 0)[:, 0], grow, last, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def dist(self, params, h, embeds, depth):
        """The distribution `[B, T, U]` after `depth` drafted tokens.

        Args:
          params: {"target": ..., "draft": ...}.
          h: `[B, T, E]`, the state into which they were mixed.
          embeds: `[B, T, E]`, the embedding of the last of them; None at depth 0.
          depth: static.
        """
        return draft_logits(self.target, params, self.output(params["draft"], h, embeds, depth))

    @abc.abstractmethod
    def output(self, own: Any, h: Any, embeds: Any, depth: int) -> Any:
        """The input `[B, T, E]` of the language-model head; for the arguments see `dist`."""
