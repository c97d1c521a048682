"""EAGLE-3's draft layers (Li et al. 2025, arXiv:2503.01840): decoder layers over several of the target's features.

Pairs are EAGLE's. Shapes: `B` rows, `T` pairs, `E` width, `C` taps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.eagle.network import EagleHead
from specjax.models.norms import RMSNorm, rms_norm

Array = jax.Array


class Eagle3(nnx.Module):
    """EAGLE-3: attention reads the normed embedding beside the normed feature; the residual is the feature itself.

    Layers after the first are ordinary and do not see the embedding.
    """

    def __init__(self, head: "Eagle3Head", dtype: Any, rngs: nnx.Rngs):
        c, width = head.config, head.config.hidden_size
        wide = head.target_size or width
        norm = lambda size: RMSNorm(size, c.norm.eps, dtype)
        self.fc = nnx.Linear(head.taps * wide, width, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        if head.norm_before_fc:
            self.fc_norm = norm(head.taps * wide)
        if head.fc_norm:
            self.tap_norms = nnx.List([norm(wide) for _ in range(head.taps)])
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (norm(width) for _ in range(4))
        self.attention = c.attention().build(width, dtype, rngs, inputs=2 * width)
        self.mlp = c.dense.build(width, dtype, rngs)
        if c.num_hidden_layers > 1:
            self.more = nnx.List([layer.build(width, dtype, rngs) for layer in c.layers[1:]])
        self.norm_before_residual = head.norm_before_residual

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        features = features.astype(embeds.dtype)
        normed = self.hidden_norm(features)
        x = jnp.concatenate([self.input_norm(embeds), normed], axis=-1)
        attended, kv = self.attention(x, rope, block, caches[0], pasts[0], positions)
        h = (normed if self.norm_before_residual else features) + attended
        h, kvs = h + self.mlp(self.mlp_norm(h)), [kv]
        for layer, cache, past in zip(getattr(self, "more", ()), caches[1:], pasts[1:], strict=True):
            h, kv = layer(h, rope, block, cache, past, positions)
            kvs.append(kv)
        return h, kvs


@dataclasses.dataclass(frozen=True)
class Eagle3Head(EagleHead):
    """EAGLE-3's module as functions of a params pytree.

    Attributes:
      taps: how many of the target's layers are fused.
      norm_before_residual: whether the residual around attention is the normed feature.
      norm_before_fc: whether the taps are normed first, all of them as one vector (`fc_norm` of the parameters).
      fc_norm: whether the taps are normed first, each by itself (`tap_norms`; EAGLE-3.1).
      target_size: the target's width if it differs from the head's; None: the same.
    """

    taps: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    target_size: int | None = None

    def fuse(self, params: Any, taps: Array) -> Array:
        """`[B, T, C * target_size]` taps of the target to features `[B, T, E]`."""
        taps = taps.astype(params["fc"]["kernel"].dtype)
        if self.norm_before_fc:
            taps = rms_norm(taps, params["fc_norm"]["scale"], self.config.norm.eps)
        if self.fc_norm:
            each = jnp.split(taps, self.taps, axis=-1)
            scales = [params["tap_norms"][j]["scale"] for j in range(self.taps)]
            normed = [rms_norm(x, s, self.config.norm.eps) for x, s in zip(each, scales, strict=True)]
            taps = jnp.concatenate(normed, axis=-1)
        return taps @ params["fc"]["kernel"]

    def norm(self, params: Any, h: Array) -> Array:
        """The norm before the draft's language-model head."""
        return rms_norm(h, params["norm"]["scale"], self.config.norm.eps)

    def _module(self, dtype, rngs) -> nnx.Module:
        return Eagle3(self, dtype, rngs)
