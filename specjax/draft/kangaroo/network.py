"""Kangaroo's adapter (arXiv:2404.18911, section 3.1): one attention between two norms, and no MLP.

It turns the target's residual stream after a few layers into features that the target's own head reads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.lm import Block
from specjax.models.few_bits import is_quantised, plain
from specjax.models.kv import KVCache, KVDelta, init_kv
from specjax.models.model_config import ModelConfig

Array = jax.Array


class Adapter(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        whole = dataclasses.replace(config.attention(), window=None, chunked=False)
        self.attention_norm = config.norm.build(config.hidden_size, dtype)
        self.attention = whole.build(config.hidden_size, dtype, rngs)
        self.norm = config.norm.build(config.hidden_size, dtype)


@functools.lru_cache(maxsize=64)
def _abstract(config: ModelConfig, dtype: Any):
    return nnx.split(nnx.eval_shape(lambda: Adapter(config, dtype, nnx.Rngs(0))))


def abstract(config: ModelConfig) -> Any:
    """The adapter's params as `jax.ShapeDtypeStruct`s."""
    return nnx.to_pure_dict(_abstract(config, jnp.float32)[1])


def init(config: ModelConfig, target_params: Any, layer: int) -> Any:
    """Params to start training from: the target's own attention of `layer`, under its final norm or, without one, the
    layer's last."""
    own = target_params["layers"][layer]
    norm = target_params.get("norm", own.get("mlp_norm"))
    params = {"attention_norm": own["attention_norm"], "attention": own["attention"], "norm": norm}
    return jax.tree.map(lambda x: plain(x).copy(), params, is_leaf=is_quantised)


def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """An empty cache of one layer."""
    return init_kv(config.first(1), batch, capacity, dtype)


def adapt(
    config: ModelConfig, params: Any, h: Array, block: Block, cache: KVCache | None, past: KVDelta | None = None
) -> tuple[Array, KVDelta]:
    """Features for the target's head, `[B, T, E]`, and the adapter's own keys and values.

    Args:
      config: the target's.
      params: the adapter's.
      h: `[B, T, E]`, the residual stream after the shared layers.
      block: the block; its tokens are not read.
      cache: of one layer, or None.
      past: of one layer, or None.
    """
    own = {name: params[name] for name in abstract(config)}  # a trimmed head lies beside them
    dtype = params_dtype(own)
    adapter = nnx.merge(_abstract(config, dtype)[0], own)
    h = h.astype(dtype)
    committed = None if cache is None else (cache.key[0], cache.value[0])
    earlier = None if past is None else (past.key[0], past.value[0])
    normed = adapter.attention_norm(h)
    rope = config.tables(block.positions)
    attended, (key, value) = adapter.attention(normed, rope, block, committed, earlier, block.positions)
    return adapter.norm(h + attended), KVDelta((key,), (value,), block.positions)
