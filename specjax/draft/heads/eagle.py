"""EAGLE's draft layers (Li et al. 2024, arXiv:2401.15077; 2025, arXiv:2503.01840): a decoder layer over target features.

Slot i holds the pair (feature of token i, embedding of token i + 1) at position i; its output predicts token i + 2.
Shapes: `B` rows, `T` pairs, `E` width, `C` taps, `U` columns of the draft head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.lm import Block
from specjax.models.kv import KVCache, KVDelta
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm, rms_norm

Array = jax.Array
_BESIDES = ("head", "ids", "embed", "mask", "mask_feature")
"""Parameters of drafters that are not their module's."""


class EagleLayer(nnx.Module):
    """A decoder layer without the norm before attention; both residuals stay."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        self.attention = config.attention().build(config.hidden_size, dtype, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm.eps, dtype)
        self.mlp = config.layers[0].feed.build(config.hidden_size, dtype, rngs)

    def __call__(self, x, rope, block, cache, past, positions):
        attended, kv = self.attention(x, rope, block, cache, past, positions)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kv


class Eagle(nnx.Module):
    """EAGLE-1 and EAGLE-2: `fc` over embedding and feature, then the layer."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.fc = nnx.Linear(2 * width, width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layer = EagleLayer(config, dtype, rngs)

    def __call__(self, embeds, features, rope, block, caches, pasts, positions):
        x = self.fc(jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1))
        x, kv = self.layer(x, rope, block, caches[0], pasts[0], positions)
        return x, [kv]


class Eagle3(nnx.Module):
    """EAGLE-3: attention reads the normed embedding beside the normed feature; the residual is the feature itself.

    Layers after the first are ordinary ones: the embedding is not shown to them.
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
        self.mlp = c.layers[0].feed.build(width, dtype, rngs)
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
class EagleHead:
    """EAGLE-1's module as functions of a params pytree.

    Attributes:
      config: of its layers; their width is the target's. EAGLE-1 and 2 have one.
    """

    config: ModelConfig

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(self._module(dtype, nnx.Rngs(key)))[1])

    def __call__(
        self,
        params: Any,
        embeds: Array,
        features: Array,
        block: Block,
        cache: KVCache | None,
        past: KVDelta | None = None,
    ) -> tuple[Array, KVDelta]:
        """Predicted features `[B, T, E]` of pairs, and their part of the cache.

        Args:
          params: from `init`; keys that belong to the draft's vocabulary or to its own embedding are ignored.
          embeds: `[B, T, E]`, the embedding of every pair's token.
          features: `[B, T, E]`.
          block: positions and visibility of the pairs.
          cache: of committed pairs.
          past: uncommitted pairs before this block.
        """
        own = {name: value for name, value in params.items() if name not in _BESIDES}
        dtype = params_dtype(own)
        module = nnx.merge(self._graph(dtype), own)
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        layers = self.config.num_hidden_layers
        each = lambda kv: [None] * layers if kv is None else list(zip(kv.key, kv.value, strict=True))
        rope = self.config.tables(block.positions)
        out, kvs = module(embeds.astype(dtype), features, rope, block, each(cache), each(past), positions)
        keys, values = zip(*kvs, strict=True)
        return out, KVDelta(keys, values, block.positions)

    def _module(self, dtype, rngs) -> nnx.Module:
        return Eagle(self.config, dtype, rngs)

    def _graph(self, dtype):
        return nnx.split(nnx.eval_shape(lambda: self._module(dtype, nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class Eagle3Head(EagleHead):
    """EAGLE-3's module as functions of a params pytree.

    Attributes:
      taps: how many of the target's layers are fused.
      norm_before_residual: whether the residual around attention is the normed feature.
      norm_before_fc: whether the taps are normed first, all of them as one vector (`fc_norm` of the parameters).
      fc_norm: whether they are normed first, each by itself (`tap_norms`; EAGLE-3.1).
      target_size: the target's width where it is not the head's; None: the same.
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
