"""Gemma 4's assistant: decoder layers without keys of their own, which attend to the target's cache.

It reads the target's embedding of a token beside the target's feature before it, and makes a feature of the target's
width for the next pass. All passes of a draft stand at the position of the last token, whose own keys do not exist yet.

Shapes: `B` rows, `T` slots, `W` the target's width, `E` the assistant's, `V` vocabulary, `C` clusters of tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.draft.head import params_dtype
from specjax.lm import Block
from specjax.models.kv import KVCache, KVDelta
from specjax.models.kv_bits import stored
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig

Array = jax.Array


class Gemma4Assistant(nnx.Module):
    """A projection into the assistant's width, its layers, the norm before its head, and a projection back."""

    def __init__(self, head: "AssistantHead", dtype: Any, rngs: nnx.Rngs):
        c = head.config
        linear = functools.partial(nnx.Linear, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.enter, self.leave = linear(2 * head.target_size, c.hidden_size), linear(c.hidden_size, head.target_size)
        self.layers = nnx.List([asking(c, i).build(c.hidden_size, dtype, rngs) for i in range(c.num_hidden_layers)])
        self.norm = c.norm.build(c.hidden_size, dtype)


@dataclasses.dataclass(frozen=True)
class AssistantHead:
    """The module as functions of a params pytree; keys for the vocabulary are ignored.

    Attributes:
      config: of its layers.
      target_size: W.
      sources: for every layer, which of the target's caches it reads.
    """

    config: ModelConfig
    target_size: int
    sources: tuple[int, ...]

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters."""
        return nnx.to_pure_dict(nnx.split(Gemma4Assistant(self, dtype, nnx.Rngs(key)))[1])

    def __call__(
        self,
        params: Any,
        embeds: Array,
        features: Array,
        block: Block,
        cache: KVCache | None,
        past: KVDelta | None = None,
    ) -> tuple[Array, Array]:
        """Normed outputs `[B, T, E]` for the head, and features `[B, T, W]` for the passes below them.

        Args:
          params: from `init`.
          embeds: `[B, T, W]`, the target's embedding of every token.
          features: `[B, T, W]`, the features before each.
          block: positions of the tokens; `length` is how much of the cache they see.
          cache: the target's.
          past: keys and values of the target that are in no cache; then `block.visible` `[B, T, P]` says which tokens
            see them.
        """
        own = {name: params[name] for name in ("enter", "leave", "layers", "norm")}
        dtype = params_dtype(own)
        module = nnx.merge(self._graph(dtype), own)
        x = jnp.concatenate([embeds, features.astype(embeds.dtype)], axis=-1).astype(dtype)
        h = module.enter(x)
        longest, kinds = self.config.max_position_embeddings, self.config.attentions
        ropes = {kind: kind.tables(block.positions, longest) for kind in dict.fromkeys(kinds)}
        # Attention has a key for every query; no query sees one of these.
        batch, length = block.positions.shape
        unseen = jnp.zeros((batch, length, length), bool)
        positions, visible = block.positions, unseen
        if past is not None and block.visible is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
            visible = jnp.concatenate([block.visible, unseen], axis=2)
        seen = dataclasses.replace(block, visible=visible)
        for layer, kind, source in zip(module.layers, kinds, self.sources, strict=True):
            own = None if cache is None else cache.layer(source, block.length)
            above = None if past is None else (past.key[source], past.value[source])
            none = _no_keys(own, above, batch, length)
            h, _ = layer(h, ropes[kind], seen, own, above, positions, shared=none)
        h = module.norm(h)
        return h, module.leave(h)

    def _graph(self, dtype):
        return nnx.split(nnx.eval_shape(lambda: Gemma4Assistant(self, dtype, nnx.Rngs(0))))[0]


def clustered(params: Any, h: Array, top: int) -> Array:
    """The distribution `[B, T, V]` float32 of outputs `[B, T, E]` over the tokens of the `top` likeliest clusters.

    The other tokens are impossible.

    Args:
      params: `centroids`: {`kernel` `[E, C]`}, `clusters`: {`kernel` `[C, E, V / C]`}, and `members` `[C, V / C]`,
        their ids.
      h: the outputs.
      top: how many clusters are read.
    """
    chosen = jax.lax.top_k(h @ params["centroids"]["kernel"], top)[1]
    kernels, ids = params["clusters"]["kernel"][chosen], params["members"][chosen]
    logits = jnp.einsum("bte,btkev->btkv", h, kernels, preferred_element_type=jnp.float32)
    rows, flat = h.shape[:2], lambda x: x.reshape(-1, top * params["members"].shape[1])
    dist = jnp.full((rows[0] * rows[1], params["members"].size), -jnp.inf)
    dist = dist.at[jnp.arange(len(dist))[:, None], flat(ids)].set(flat(logits), unique_indices=True)
    return dist.reshape(*rows, -1)


def asking(config: ModelConfig, layer: int) -> LayerConfig:
    """A layer with only queries.

    A window of W lets an assistant see W + 1 keys before its own position; our windows count that position too.
    """
    own, mixer = config.layers[layer], config.attention(layer)
    window = None if mixer.window is None else mixer.window + 2
    return dataclasses.replace(own, mixer=dataclasses.replace(mixer, window=window, source=0))


def _no_keys(cache: Any, past: Any, batch: int, length: int) -> tuple[Any, Any]:
    heads, width = past[0].shape[2:] if cache is None else (cache[0].shape[1], cache[0].shape[3])
    none = jnp.zeros((batch, length, heads, width))
    like = past if cache is None else cache
    return stored(none, like[0]), stored(none, like[1])
