"""Hydra and Hydra++: Medusa's heads, which also see the tokens drafted before them (Ankner et al. 2024, arXiv:2402.05109)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import layers_config
from specjax.draft.head import head_kernel, head_scores
from specjax.draft.medusa import Medusa


@dataclasses.dataclass(frozen=True)
class Hydra(Medusa):
    """Head i reads the feature, the root's embedding and those of the i tokens drafted above.

    `params["draft"]` is {`heads`: a list of {`input`: {`kernel`, `bias`, `shortcut`, `shortcut_bias`} from `(i + 2) E`
    to `E`, `blocks`: [{`kernel`, `bias`}], `kernel` `[E, U]`, `bias` `[U]`}}. It has `ids` `[U]` if the heads know
    fewer tokens than the target, and `prefix` with `prefix_layer`. A head's first residual block takes the wide input.
    Without `own_head`, `kernel` is shared, as Medusa's is.

    Attributes:
      prefix_layer: Hydra++: one decoder layer and norm over the target's features, cached like one more layer.
    """

    about = About(
        "hydra",
        "Medusa's heads made to see the tokens above",
        "arXiv:2402.05109",
        expander="chain:length=2",
        paper="expander=static,tree=10 | 10 7 3 2 1x6 | 10 3 2 1x5 0x2 2 0x6 1 | 2",
        loads="head",
    )
    tiles = True
    shared = False

    fewest_layers = 1

    prefix_layer: bool = False

    @property
    def cache_config(self):
        return layers_config(self.target, "Hydra") if self.prefix_layer else None

    @property
    def prefix(self):
        """The prefix layer's module, as functions."""
        from specjax.draft.hydra.network import PrefixHead

        return PrefixHead(layers_config(self.target, "Hydra"))

    def init_params(self, key, target_params):
        """The wide input starts as the feature alone, blocks as the identity, kernels as the target's head."""
        size = self.feature_size
        kernel = head_kernel(self.target, target_params)
        zeros = lambda *shape: jnp.zeros(shape, kernel.dtype)

        def head(i):
            wide = (i + 2) * size
            shortcut = zeros(wide, size).at[:size].set(jnp.eye(size, dtype=kernel.dtype))
            first = {
                "kernel": zeros(wide, size),
                "bias": zeros(size),
                "shortcut": shortcut,
                "shortcut_bias": zeros(size),
            }
            blocks = [{"kernel": zeros(size, size), "bias": zeros(size)} for _ in range(self.layers - 1)]
            last = {"kernel": kernel} if self.own_head else {}
            return {"input": first, "blocks": blocks, "bias": zeros(kernel.shape[1]), **last}

        params = {"heads": [head(i) for i in range(self.heads)]}
        return {**params, "prefix": self.prefix.init(key, kernel.dtype)} if self.prefix_layer else params

    @classmethod
    def objective(cls):
        from specjax.draft.hydra.objective import TrainHydra

        return TrainHydra

    @classmethod
    def layout(cls):
        from specjax.draft.hydra.published import LAYOUT

        return LAYOUT

    def read(self, params, features, block, cache, past=None):
        if not self.prefix_layer:
            return super().read(params, features, block, cache, past)
        return self.prefix(params["draft"]["prefix"], features, block, cache)

    def propose(self, params, draft, view, sampler):
        own = params["draft"]
        embed = lambda tokens: self.target.embed(params["target"], tokens)
        batch, size = draft.feature.shape

        def dist(depth, lines):  # lines [B, F, heads + 1, E]: root and drafted tokens, zeros below
            seen = lines[:, :, : depth + 1].reshape(batch, lines.shape[1], (depth + 1) * size)
            prefix = jnp.broadcast_to(draft.feature[:, None], (batch, lines.shape[1], size))
            wide = jnp.concatenate([prefix, seen.astype(prefix.dtype)], axis=-1)
            return head_logits(own["heads"][depth], wide, own.get("kernel"))

        def grow(known, level):  # lines of the root and of every scored node
            lines = jnp.take_along_axis(known, level.parent[:, :, None, None] + 1, axis=1)
            lines = lines.at[:, :, level.depth].set(embed(level.tokens))
            return jnp.concatenate([known, lines], axis=1), dist(level.depth, lines)

        root = embed(view.root[:, None])
        lines = jnp.zeros((batch, 1, self.heads + 1, size), root.dtype).at[:, :, 0].set(root)
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dist(0, lines)[:, 0], grow, lines, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)


def head_logits(head, x, kernel=None):
    """A head's logits `[..., U]` in float32 from its wide input `[..., (i + 2) E]`; `kernel` as in `medusa.head_logits`."""
    row = lambda bias: jnp.reshape(bias, (1,) * (x.ndim - 1) + bias.shape)
    first, x = head["input"], x.astype(head["input"]["kernel"].dtype)
    h = x @ first["shortcut"] + row(first["shortcut_bias"]) + jax.nn.silu(x @ first["kernel"] + row(first["bias"]))
    for block in head["blocks"]:
        h = h + jax.nn.silu(h @ block["kernel"] + row(block["bias"]))
    return head_scores(h, head["kernel"] if kernel is None else kernel) + row(head["bias"]).astype(jnp.float32)
