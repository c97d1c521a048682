"""DFlash's draft layers (arXiv:2602.06036): a block of masked tokens over keys and values made from the target's features.

Slot i of the cache holds keys and values of feature i, at its own position; features pass through no layer. A block
begins with the last token and continues with masks. Its slots see the cache and, in layers without a window, each
other.

Shapes: `B` rows, `T` slots, `E` width, `C` taps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.draft.windows import Windows
from specjax.lm import Block
from specjax.models.attention import Attention
from specjax.models.kv import KVCache, KVDelta
from specjax.models.model_config import ModelConfig
from specjax.models.norms import RMSNorm

Array = jax.Array


class DFlash(nnx.Module):
    """`fc` and a norm over the target's features, ordinary decoder layers, and the norm before the head."""

    def __init__(self, head: "DFlashHead", dtype: Any, rngs: nnx.Rngs):
        c = head.config
        inputs, width = head.taps * (head.target_size or c.hidden_size), c.hidden_size
        self.fc = nnx.Linear(inputs, width, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.hidden_norm, self.norm = (RMSNorm(width, c.norm.eps, dtype) for _ in range(2))
        self.layers = nnx.List([layer.build(width, dtype, rngs) for layer in c.layers])


@dataclasses.dataclass(frozen=True)
class DFlashHead:
    """The module as functions of a params pytree; keys for vocabulary and embeddings are ignored.

    Attributes:
      config: of its layers.
      taps: how many of the target's layers are fused.
      causal: whether all layers are causal within a block.
      target_size: the target's width if it differs from the head's; None: the same.
      windows: what slots see in layers with a window.
    """

    config: ModelConfig
    taps: int = 1
    causal: bool = False
    target_size: int | None = None
    windows: Windows = Windows()

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(DFlash(self, dtype, nnx.Rngs(key)))[1])

    def context(self, params: Any, features: Array, positions: Array) -> KVDelta:
        """The cache entries of features `[B, T, C * target_size]` at `positions` `[B, T]`, one entry for all layers."""
        module = self._bound(params)
        c = module.hidden_norm(module.fc(features.astype(params["fc"]["kernel"].dtype)))
        rope = self.config.tables(positions)
        keys, values = zip(*(_keys_values(layer.mixer, c, rope) for layer in module.layers), strict=True)
        return KVDelta(keys, values, positions)

    def __call__(
        self, params: Any, embeds: Array, block: Block, cache: KVCache | None, past: KVDelta | None = None,
        begins: Array | None = None,
    ) -> Array:  # fmt: skip
        """Normed outputs `[B, T, E]` of blocks, for the language-model head.

        Args:
          params: from `init`.
          embeds: `[B, T, E]`, of the last token and the masks after it.
          block: positions and visibility of the slots; without `visible` they are one block, `causal` or not.
          cache: of the features before the block.
          past: features that are in no cache; then `block.visible` says which slots see them.
          begins: `[B, T]`, where each slot's block begins; None: there is one block, which begins with the first slot.
        """
        module, positions = self._bound(params), block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        rope, h = self.config.tables(block.positions), embeds.astype(params_dtype(params["fc"]))
        for i, layer in enumerate(module.layers):
            near = self.config.window(i) is not None
            seen = _causal(block, positions) if self.causal or near and self.windows.causal else block
            if near and self.windows.from_start:
                first = block.positions[:, :1] if begins is None else begins
                seen = dataclasses.replace(seen, positions=jnp.broadcast_to(first - 1, block.positions.shape))
            own = None if cache is None else (cache.key[i], cache.value[i])
            above = None if past is None else (past.key[i], past.value[i])
            h, _ = layer(h, rope, seen, own, above, positions)
        return module.norm(h)

    def _bound(self, params: Any) -> DFlash:
        own = {name: params[name] for name in ("fc", "hidden_norm", "norm", "layers")}
        graph = nnx.split(nnx.eval_shape(lambda: DFlash(self, params_dtype(own), nnx.Rngs(0))))[0]
        return nnx.merge(graph, own)


def _keys_values(attention: Attention, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array]:
    """A layer's keys and values `[B, T, K, H]` from `[B, T, E]`, computed as for its own slots."""
    return attention.keys(x, rope), attention.values(x)


def _causal(block: Block, positions: Array) -> Block:
    """The same block, in which no slot sees a later one. Features come before the slots in any case."""
    if block.visible is None:
        return dataclasses.replace(block, causal=True)
    before = positions[:, None, :] <= block.positions[:, :, None]
    return dataclasses.replace(block, visible=block.visible & before)
