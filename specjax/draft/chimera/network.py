"""Chimera's two encoders (Zeng et al. 2024, arXiv:2402.15758): of three tokens, and of the whole context.

A pair takes two slots of the layer: the target's feature of token t at position t, and the trigram that ends with token
t + 1 at position t + 1. A trigram sees all features and trigrams up to its own pair, and its output says what follows it.
Shapes: `B` rows, `T` pairs or nodes, `E` width.
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

Array = jax.Array


class Chimera(nnx.Module):
    """A residual block over three embeddings and a projection of them, and one decoder layer without a final norm."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        size = config.hidden_size
        linear = lambda outputs, **kw: nnx.Linear(3 * size, outputs, param_dtype=dtype, dtype=dtype, rngs=rngs, **kw)
        self.trigram = linear(3 * size, kernel_init=nnx.initializers.zeros_init())
        self.narrow = linear(size, use_bias=False)
        self.layer = config.layers[0].build(size, dtype, rngs)

    def encode(self, grams: Array) -> Array:
        return self.narrow(grams + jax.nn.silu(self.trigram(grams)))


@dataclasses.dataclass(frozen=True)
class ChimeraHead:
    """The encoders as functions of a params pytree.

    Attributes:
      config: of the one layer.
    """

    config: ModelConfig

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters; the residual block starts as the identity except for its bias."""
        return nnx.to_pure_dict(nnx.split(Chimera(self.config, dtype, nnx.Rngs(key)))[1])

    def bind(self, params: Any) -> Chimera:
        """The module that holds these parameters; output layers and ids are left out."""
        own = {name: params[name] for name in ("trigram", "narrow", "layer")}
        graph = nnx.split(nnx.eval_shape(lambda: Chimera(self.config, params_dtype(params["layer"]), nnx.Rngs(0))))[0]
        return nnx.merge(graph, own)

    def encode(self, params: Any, grams: Array) -> Array:
        """`[B, T, E]` of three tokens' embeddings each, `[B, T, 3 E]`."""
        return self.bind(params).encode(grams.astype(params_dtype(params["layer"])))

    def __call__(
        self, params: Any, x: Array, block: Block, cache: KVCache | None, past: KVDelta | None = None
    ) -> tuple[Array, KVDelta]:
        """The layer's outputs `[B, S, E]` for S slots, and their part of the cache.

        Args:
          params: from `init`.
          x: `[B, S, E]`, features and encoded trigrams.
          block: positions and visibility of the slots; two slots of a pair precede those of the next.
          cache: of committed pairs, two slots each; `block.length` counts slots.
          past: uncommitted slots before this block.
        """
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        each = lambda kv: None if kv is None else (kv.key[0], kv.value[0])
        rope = self.config.tables(block.positions)
        module, x = self.bind(params), x.astype(params_dtype(params["layer"]))
        out, (key, value) = module.layer(x, rope, block, each(cache), each(past), positions)
        return out, KVDelta((key,), (value,), block.positions)


def interleaved(first: Array, second: Array) -> Array:
    """`[B, 2 T, ...]` from two `[B, T, ...]`: slots 2 t and 2 t + 1 are those of pair t."""
    return jnp.stack([first, second], axis=2).reshape(first.shape[0], 2 * first.shape[1], *first.shape[2:])


def slotted(block: Block) -> Block:
    """The slots of a block of pairs: both see the pairs that their pair sees. The outputs of the first one are of no use."""
    visible = block.visible
    if visible is not None:
        visible = jnp.repeat(jnp.repeat(visible, 2, axis=2), 1 if visible.shape[1] == 1 else 2, axis=1)
    unseen = None if block.unseen is None else jnp.repeat(block.unseen, 2, axis=1)
    return Block(
        interleaved(block.tokens, block.tokens), interleaved(block.positions, block.positions + 1), 2 * block.length, visible,
        unseen=unseen, causal=block.causal, split=block.split,
    )  # fmt: skip
