"""DFlash: a small block-diffusion model over the target's features drafts a block in one pass (arXiv:2602.06036)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.eagle3 import default_taps as few_taps
from specjax.draft.feature import FeatureDrafter, layers_config, mask_embedding, sized, sizes
from specjax.draft.head import draft_logits
from specjax.draft.windows import Windows
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants


@dataclasses.dataclass(frozen=True)
class DFlash(FeatureDrafter):
    """A few decoder layers read the last token and masks after it once; their cache is made from the target's features.

    The distributions of a block do not depend on the drafted tokens, so any tree no deeper than the block costs one
    pass.

    `params["draft"]` is DFlashHead's, with `mask`: {`embedding` `[1, E]`}. It optionally holds `head`: {`kernel`
    `[E, U]`}, `ids` `[U]` and `embed`: {`embedding` `[V, E]`}, if they are not the target's.

    Attributes:
      expander: turns the distributions into a tree; no deeper than `drafts`.
      taps: the layers whose outputs are fused; empty: see `default_taps`.
      layers: decoder layers, if `config` does not say it.
      inner: the width of their MLPs; 0 for the config's, or the target's.
      heads: heads of their attention; 0 for the config's, or the target's.
      kv_heads: key and value heads; 0 for the config's, or the target's.
      head_dim: the width of a head; 0 for the config's, or the target's.
      block: slots of a block.
      from_anchor: whether the first slot, the last token's, predicts the token after it; otherwise each slot predicts
        its own token.
      causal: whether no slot sees a later one.
      mask: the id whose embedding the mask starts from, also for a published file that names none; -1 for the mean.
      config: the layers' `ModelConfig`; None for the target's own sizes.
      windows: what slots see in layers of it with a window.
    """

    about = About(
        "dflash",
        "a block at once, by diffusion over the target's features",
        "arXiv:2602.06036",
        expander="chain:length=3",
        paper="expander=chain,length=15",
        loads="head",
    )
    tiles = True
    shared = True

    expander: Expander = Chain(3)
    taps: tuple[int, ...] = ()
    layers: int = 1
    block: int = 8
    from_anchor: bool = False
    causal: bool = False
    inner: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mask: int = -1
    config: Any = None
    windows: Windows = Windows()

    feature_size = 1
    """Only the cache is kept of a feature."""

    @property
    def drafts(self) -> int:
        """Static: how many tokens a block predicts."""
        return self.block - 1 + self.from_anchor

    @property
    def feature_wants(self) -> Wants:
        return Wants(hidden=self.taps)

    @property
    def cache_config(self):
        return self.config

    @property
    def head(self):
        """The head's module, as functions."""
        from specjax.draft.dflash.network import DFlashHead

        wide = getattr(getattr(self.target, "config", None), "hidden_size", None)
        return DFlashHead(self.config, len(self.taps), self.causal, wide, self.windows)

    def bind(self, target):
        name = type(self).__name__.lower()
        if self.layers < 1 or self.drafts < 1:
            raise ValueError(
                f"{name}: a head has a layer and drafts a token, got layers={self.layers}, block={self.block}"
            )
        own = sized(self, self.config or layers_config(target, name, self.layers))
        taps = self.taps or default_taps(target.num_layers, own.num_hidden_layers)
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.num_layers:
            raise ValueError(f"{name}: taps {taps} must be increasing layers of the target's {target.num_layers}")
        if self.expander.depth > self.drafts:
            raise ValueError(
                f"{name}: a block of {self.block} drafts {self.drafts} tokens, and the tree is {self.expander.depth} deep: "
                f"choose one of at most {self.drafts} levels (length={self.drafts}), or depth={self.drafts} of a tree"
            )
        return dataclasses.replace(
            self, config=own, layers=own.num_hidden_layers, taps=taps, target=target, **sizes(own)
        )

    def init_params(self, key, target_params):
        return {**self.head.init(key), "mask": {"embedding": mask_embedding(self.target, target_params, self.mask)}}

    @classmethod
    def objective(cls):
        from specjax.draft.dflash.objective import TrainDFlash

        return TrainDFlash

    @classmethod
    def layout(cls):
        from specjax.draft.dflash.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return jnp.concatenate([output.hidden[layer] for layer in self.taps], axis=-1)

    def read(self, params, features, block, cache, past=None):
        """The features' entries of the cache; tokens are not read."""
        delta = self.head.context(params["draft"], features, block.positions)
        return delta.key[-1][:, :, 0, :1], delta

    def slots(self, params, tokens):
        """The input embeddings `[..., block, E]` of blocks that begin with `tokens` `[B, A]`."""
        first = self.embed(params, tokens)[:, :, None]
        mask = params["draft"]["mask"]["embedding"].astype(first.dtype)
        masks = jnp.broadcast_to(mask[None, None], (*tokens.shape, self.block - 1, first.shape[-1]))
        return jnp.concatenate([first, masks], axis=2)

    def outputs(self, params, draft, view):
        """The outputs of the drafting slots, `[B, drafts, E]`, normed."""
        embeds = self.slots(params, view.root[:, None])[:, 0]
        positions = draft.length[:, None] + jnp.arange(self.block)[None]
        tokens = jnp.broadcast_to(view.root[:, None], positions.shape)
        block = Block(tokens, positions, draft.length, causal=False)
        return self.head(params["draft"], embeds, block, draft.cache)[:, self.block - self.drafts :]

    def logits(self, params, h):
        """The distributions `[B, T, U]` of outputs `[B, T, E]`, by the draft's own head or the target's."""
        return draft_logits(self.target, params, h)

    def propose(self, params, draft, view, sampler):
        h = self.outputs(params, draft, view)[:, : self.expander.depth]
        dists = self.logits(params, h)
        grow = lambda carry, level: (carry, dists[:, level.depth][:, None])
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dists[:, 0], grow, None, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)


def default_taps(layers: int, draft_layers: int) -> tuple[int, ...]:
    """The outputs that a head of some layers reads: see `published_taps`; for a small model EAGLE-3's."""
    return few_taps(layers) if layers < 12 else published_taps(layers, draft_layers)


def published_taps(layers: int, draft_layers: int) -> tuple[int, ...]:
    """z-lab's rule for files that name no layers, whatever the target's size."""
    if draft_layers == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (draft_layers - 1)) for i in range(draft_layers))
