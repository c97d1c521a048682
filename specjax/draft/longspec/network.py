"""LongSpec's layer (Yang et al. 2025, arXiv:2502.17421, section 3.1): self-attention over a window, attention to the target's
keys and values, and an MLP.

The self-attention has keys of its own, of the last tokens alone. The other attention has queries and an output alone: it reads
one layer of the target's cache. Each part is after a norm and is added to the residual stream.

Shapes: `B` rows, `T` slots, `S` slots of the target's cache, `E` width, `K` kv-heads, `H` head width.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.lm import Block
from specjax.models.attention import AttentionConfig
from specjax.models.kv import KVCache, KVDelta, Slots
from specjax.models.kv_bits import stored
from specjax.models.model_config import ModelConfig

Array = jax.Array


class LongSpecLayer(nnx.Module):
    """See the module's text; `cross` is the description of the attention to the target."""

    def __init__(self, config: ModelConfig, cross: AttentionConfig, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size
        self.attention_norm = config.norm.build(width, dtype)
        self.attention = config.attention().build(width, dtype, rngs)
        self.cross_norm = config.norm.build(width, dtype)
        self.cross = cross.build(width, dtype, rngs)
        self.mlp_norm = config.norm.build(width, dtype)
        self.mlp = config.dense.build(width, dtype, rngs)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Keys and values of the target that are in no cache.

    Attributes:
      keys: (key, value), `[B, S, K, H]` each.
      positions: `[B, S]` int32.
      visible: `[B, T, S]` bool, which of them every slot sees.
    """

    keys: tuple[Array, Array]
    positions: Array
    visible: Array


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a pass sees of the target's layer.

    Attributes:
      length: `[B]` int32, how many slots of the cache.
      kept: the slots of the cache, or what is in none.
    """

    length: Array
    kept: Slots | Beside


@dataclasses.dataclass(frozen=True)
class LongSpecHead:
    """The layer as functions of a params pytree; keys for the vocabulary are ignored.

    Attributes:
      config: of the layer.
      cross: of its attention to the target.
    """

    config: ModelConfig
    cross: AttentionConfig

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(self._module(dtype, nnx.Rngs(key)))[1])

    def keys(self, params: Any, embeds: Array, positions: Array) -> KVDelta:
        """The layer's own keys and values of tokens, which depend on nothing but their embeddings `[B, T, E]`."""
        module, dtype = self._of(params)
        normed = module.attention_norm(embeds.astype(dtype))
        rope = self.config.tables(positions)
        key, value = module.attention.keys(normed, rope), module.attention.values(normed)
        return KVDelta((key,), (value,), positions)

    def __call__(
        self,
        params: Any,
        embeds: Array,
        block: Block,
        cache: KVCache | None,
        seen: Seen,
        past: KVDelta | None = None,
        turned: Array | None = None,
    ) -> tuple[Array, KVDelta]:
        """The layer's outputs `[B, T, E]`, which the target's head reads without a norm, and its own keys and values.

        Args:
          params: from `init`.
          embeds: `[B, T, E]`.
          block: positions of the tokens, and what each sees of the layer's own keys.
          cache: those keys.
          seen: what each sees of the target's.
          past: the layer's own keys and values that are in no cache.
          turned: `[B, T]` int32, positions for the ropes, if they are others than those by which the window counts.
        """
        module, dtype = self._of(params)
        h = embeds.astype(dtype)
        positions, turned = block.positions, block.positions if turned is None else turned
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        own = None if cache is None else cache.layer(0, block.length)
        above = None if past is None else (past.key[0], past.value[0])
        rope = self.config.tables(turned)
        attended, (key, value) = module.attention(module.attention_norm(h), rope, block, own, above, positions)
        h = h + attended
        h = h + self._crossed(module, module.cross_norm(h), block, seen, turned)
        return h + module.mlp(module.mlp_norm(h)), KVDelta((key,), (value,), block.positions)

    def _crossed(self, module: LongSpecLayer, x: Array, block: Block, seen: Seen, turned: Array) -> Array:
        """`[B, T, E]`, what tokens read of the target; zeros for those that see nothing of it."""
        batch, length = block.positions.shape
        unseen = jnp.zeros((batch, length, length), bool)  # attention wants a key for every query
        positions, visible, kept = block.positions, unseen, seen.kept
        found = jnp.broadcast_to(seen.length[:, None] > 0, (batch, length))
        if isinstance(kept, Beside):
            positions = jnp.concatenate([kept.positions, positions], axis=1)
            visible = jnp.concatenate([kept.visible, unseen], axis=2)
            found = kept.visible.any(axis=2)
            cache, past, like, heads = None, kept.keys, kept.keys, kept.keys[0].shape[2:]
        else:
            cache, past, like, heads = kept, None, kept[:2], kept.key.shape[1::2]
        none = tuple(stored(jnp.zeros((batch, length, *heads)), one) for one in like)
        asked = dataclasses.replace(block, length=seen.length, visible=visible)
        rope = self.cross.tables(turned, self.config.max_position_embeddings)
        out, _ = module.cross(x, rope, asked, cache, past, positions, shared=none)
        return jnp.where(found[:, :, None], out, 0)

    def _of(self, params: Any) -> tuple[LongSpecLayer, Any]:
        names = ("attention_norm", "attention", "cross_norm", "cross", "mlp_norm", "mlp")
        own = {name: params[name] for name in names}
        dtype = params_dtype(own)
        return nnx.merge(_graph(self, dtype), own), dtype

    def _module(self, dtype: Any, rngs: nnx.Rngs) -> LongSpecLayer:
        return LongSpecLayer(self.config, self.cross, dtype, rngs)


@functools.lru_cache(maxsize=64)
def _graph(head: LongSpecHead, dtype: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: head._module(dtype, nnx.Rngs(0))))[0]
