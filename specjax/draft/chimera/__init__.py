"""Chimera: a trigram encoder and a layer over the whole context, with one head for each depth (arXiv:2402.15758)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, head_config, layers_config
from specjax.draft.head import head_kernel, head_scores
from specjax.draft.medusa import settle_tree
from specjax.lm import Block, Wants
from specjax.models.kv import stack_past


@dataclasses.dataclass(frozen=True)
class Chimera(FeatureDrafter):
    """A node is read as the three tokens that end with it, by a layer that also sees all features and all earlier trigrams.

    The head of its depth reads the target's last feature and the layer's output for the node, side by side. The node sees
    its ancestors' trigrams and no other node's. The first trigram of a text has its second token twice, as in the
    authors' code (kafkayu/Chimera).

    `params["draft"]` is ChimeraHead's, and `heads`: a list of {`pair`: {`kernel` `[2 E, U]`}}. If the heads know fewer
    tokens than the target, it also has `ids` `[U]`.

    Attributes:
      expander: turns the heads' distributions into a tree, no deeper than there are heads. None for a small static
        tree.
      heads: how many.
      config: the layer's `ModelConfig`; None for the target's own sizes.
    """

    about = About(
        "chimera",
        "a trigram encoder and a layer over the whole context, a head for each depth",
        "arXiv:2402.15758",
        expander="static:tree=2 | 1",
        paper="expander=static,tree=4 | 3 2x2 1 | 3 2x2 1 | 3",
        loads="head",
    )
    tiles = True
    pair_slots = 2

    expander: Any = None
    heads: int = 4
    config: Any = None

    feature_wants = Wants(final=True)

    def __post_init__(self):
        settle_tree(self, self.heads)
        super().__post_init__()

    @property
    def cache_config(self):
        return self.config or layers_config(self.target, "chimera")

    @property
    def feature_size(self) -> int:
        return 3 * self.cache_config.hidden_size

    @property
    def head(self):
        """The encoders, as functions."""
        from specjax.draft.chimera.network import ChimeraHead

        return ChimeraHead(self.cache_config)

    def bind(self, target):
        head_config(target, "chimera")
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params):
        """Output layers start as two copies of the target's head, so that fresh heads score the sum of both inputs."""
        kernel = head_kernel(self.target, target_params)
        twice = jnp.concatenate([kernel, kernel])
        return {**self.head.init(key, kernel.dtype), "heads": [{"pair": {"kernel": twice}} for _ in range(self.heads)]}

    @classmethod
    def objective(cls):
        from specjax.draft.chimera.objective import TrainChimera

        return TrainChimera

    @classmethod
    def layout(cls):
        from specjax.draft.chimera.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return output.final

    def continued(self, params, draft, features, tokens):
        """`[B, T, 3 E]`: the feature, and the embeddings of its own token and of the one before."""
        own = self.embed(params, tokens)
        first = draft.feature[:, None, -own.shape[2] :].astype(own.dtype)
        return self.joined(features, own, jnp.concatenate([first, own[:, :-1]], axis=1))

    def joined(self, features, own, before):
        """See `continued`."""
        return jnp.concatenate([features, own, before.astype(own.dtype)], axis=-1)

    def read(self, params, features, block, cache, past=None):
        """The final feature, the layer's output for the pair's trigram and the own token's embedding, `[B, T, 3 E]`."""
        x, slots = self.slots_of(params, features, block)
        out, delta = self.head(params["draft"], x, slots, cache, past)
        final, own, _ = jnp.split(features, 3, axis=-1)
        return jnp.concatenate([final.astype(out.dtype), out[:, 1::2], own.astype(out.dtype)], axis=-1), delta

    def slots_of(self, params, features, block):
        """The layer's inputs `[B, 2 T, E]` for the features and trigrams of pairs, and the block of these slots."""
        from specjax.draft.chimera.network import interleaved, slotted

        final, own, before = jnp.split(features, 3, axis=-1)
        after = self.embed(params, block.tokens)
        begins = (block.positions == 0)[..., None]
        grams = jnp.where(begins, jnp.concatenate([own, after, after], -1), jnp.concatenate([before, own, after], -1))
        trigrams = self.head.encode(params["draft"], grams)
        return interleaved(final.astype(trigrams.dtype), trigrams), slotted(block)

    def propose(self, params, draft, view, sampler):
        own, last = params["draft"], jnp.split(draft.feature[:, None], 3, axis=-1)
        size = last[0].shape[2]

        def dist(depth, out):
            final = jnp.broadcast_to(last[0], out.shape)
            return self.dist(own, depth, jnp.concatenate([final, out], axis=-1))

        def grow(carry, level):
            past, ends = carry  # embeddings of the last two tokens of the root's line and of every scored node's
            above = jnp.take_along_axis(ends, level.parent[:, :, None] + 1, axis=1)
            grams = jnp.concatenate([above, self.embed(params, level.tokens).astype(above.dtype)], axis=-1)
            positions = draft.length[:, None] + jnp.full(level.tokens.shape, level.depth)
            block = Block(level.tokens, positions, self.pair_slots * draft.length, level.visible)
            out, delta = self.head(own, self.head.encode(own, grams), block, draft.cache, past)
            ends = jnp.concatenate([ends, grams[..., size:]], axis=1)
            return (stack_past(past, delta), ends), dist(level.depth, out)

        root = self.embed(params, view.root[:, None]).astype(last[2].dtype)
        begin = None, jnp.concatenate([last[2], root], axis=-1)
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dist(0, last[1])[:, 0], grow, begin, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def dist(self, own, depth, both):
        """The distribution `[B, T, U]` after `depth` drafted tokens, from feature and output side by side, `[B, T, 2 E]`."""
        return head_scores(both, own["heads"][depth]["pair"]["kernel"])

    def trimmed(self, params, target_params, ids):
        heads = [{"pair": {"kernel": head["pair"]["kernel"][:, ids]}} for head in params["heads"]]
        return self, {**params, "heads": heads, "ids": jnp.asarray(ids, jnp.int32)}
