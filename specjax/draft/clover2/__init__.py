"""Clover-2: recurrent heads joined by regressive attention (Xiao et al. 2024, arXiv:2408.00264)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, head_config, layers_config
from specjax.draft.head import draft_logits, head_kernel
from specjax.expand import Chain, Expander
from specjax.lm import Wants
from specjax.models.few_bits import is_quantised, plain
from specjax.models.kv_heads import merged


@dataclasses.dataclass(frozen=True)
class Clover2(FeatureDrafter):
    """Two decoder layers over (feature, next token) make a state; every drafted token is mixed into it without attention.

    It reads the target's last layer before the final norm. `params["draft"]` is CloverHead's. It optionally holds
    `head`: {`kernel` `[E, U]`} and `ids` `[U]` for fewer draft tokens, and `embed`: {`embedding` `[V, E]`} if the
    embedding is not the target's.

    Attributes:
      expander: turns next-token distributions into a tree.
      layers: decoder layers before the heads.
      published: whether the network is the authors' (XiaoBin1992/clover): augmenting blocks `W h + b` and
        `W [h; e] + b`, and tokens embedded by the rows of the target's head, which are not trained. Otherwise, as in a
        small head trained here, they are `h + silu(W h + b)` and `h + silu(W [h; e] + b)`, with the target's own
        embedding.
      config: the layers' `ModelConfig`; None for the target's own sizes.
    """

    about = About(
        "clover2",
        "recurrent heads with attention to the last token",
        "arXiv:2408.00264",
        expander="chain:length=3",
        paper="expander=static,tree=4 | 3 2x2 1 | 3 2x2 1 | 3 | 2",
        fields=("layers",),
        loads="head",
    )
    tiles = True

    expander: Expander = Chain()
    layers: int = 2
    published: bool = False
    config: Any = None

    @property
    def feature_wants(self) -> Wants:
        return Wants(hidden=(self.target.num_layers - 1,))

    @property
    def cache_config(self):
        return self.config or layers_config(self.target, "clover2", self.layers)

    @property
    def feature_size(self) -> int:
        return self.cache_config.hidden_size

    @property
    def head(self):
        """The modules, as functions."""
        from specjax.draft.clover2.network import CloverHead

        return CloverHead(self.cache_config, self.published)

    def bind(self, target):
        if self.layers < 1:
            raise ValueError(f"clover2: a head has at least one layer, got layers={self.layers}")
        head_config(target, "clover2")
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params):
        """Decoder layers start as the target's last one, norms as its final one or, without one, as that layer's last."""
        params = self.head.init(key)
        target_params = merged(target_params, self.target.config, self.target.kv_copies)
        last = target_params["layers"][self.target.num_layers - 1]
        last = jax.tree.map(plain, last, is_leaf=is_quantised)
        norm = target_params.get("norm", last.get("mlp_norm"))
        params |= {"layers": dict.fromkeys(range(self.layers), last), "norm": norm, "head_norm": norm}
        if self.published:
            params["embed"] = {"embedding": head_kernel(self.target, target_params).T}
        return params

    @classmethod
    def objective(cls):
        from specjax.draft.clover2.objective import TrainClover2

        return TrainClover2

    @classmethod
    def layout(cls):
        from specjax.draft.clover2.published import LAYOUT

        return LAYOUT

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
            return jnp.concatenate([states, h], axis=1), self.dist(params, h, embeds)

        last = draft.feature[:, None]
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, self.dist(params, last, None)[:, 0], grow, last, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def dist(self, params, h, embeds):
        """The distribution `[B, T, U]` of a state, given the embedding of the last token mixed in; None for the first head."""
        return draft_logits(self.target, params, self.head.outputs(params["draft"], h, embeds))
