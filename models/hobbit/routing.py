"""The routing of given texts: which experts every token chose, and which the gates of later layers foretold.

Shapes: `B` texts, `T` tokens of each, `L` layers with experts, `k` experts per token, `d` layers ahead, `E` width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import Block, inputs
from specjax.models.experts import ExpertsConfig, Router, SparseMLP
from specjax.models.llama import LlamaLM

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of texts.

    Attributes:
      weights: `[B, T, L, k]` float32, in the order of choice.
      experts: `[B, T, L, k]` int32.
      ahead_weights: `[B, T, L, d, k]` float32: what the routers of the next d layers give for what this layer's router reads.
        Layers after the last have zeros.
      ahead_experts: `[B, T, L, d, k]` int32; -1 for layers after the last.
    """

    weights: Array
    experts: Array
    ahead_weights: Array
    ahead_experts: Array

    @property
    def foretold(self) -> Array:
        """The share of a layer's experts that the layer before foretold; a float32."""
        hits = (self.ahead_experts[:, :, :-1, 0, :, None] == self.experts[:, :, 1:, None]).any(axis=-1)
        return hits.mean(dtype=jnp.float32)


def of_texts(lm: LlamaLM, params: Any, tokens: Array, ahead: int = 1) -> Routing:
    """The routing of texts, read in one causal pass.

    Args:
      lm: with experts of one kind, in place of its MLPs.
      params: its parameters, in whatever form.
      tokens: `[B, T]` int32.
      ahead: d, at least 1.

    Raises:
      ValueError: for another model, or no layer ahead.
    """
    kinds = {layer.feed for layer in lm.config.layers if isinstance(layer.feed, ExpertsConfig)}
    if len(kinds) != 1 or any(layer.beside for layer in lm.config.layers):
        raise ValueError(
            "routing is read of models whose layers have experts of one kind in place of an MLP: load such a one"
        )
    if ahead < 1:
        raise ValueError(f"routing is foretold for at least one layer, got {ahead}")
    return _of_texts(lm, params, tokens, ahead)


def _of_texts(lm: LlamaLM, params: Any, tokens: Array, ahead: int) -> Routing:
    read: list[Array] = []
    routers: list[Router] = []

    class Recording(LlamaLM):
        """The model, whose routers note what they read."""

        def bind(self, params: Any) -> Any:
            model = LlamaLM.bind(self, params)
            for layer in model.layers:
                if isinstance(getattr(layer, "mlp", None), SparseMLP):
                    own = layer.mlp.router
                    routers.append(own)
                    layer.mlp.router = lambda x, block=None, own=own: (read.append(x), own(x, block))[1]
            return model

    noted = Recording(**{field.name: getattr(lm, field.name) for field in dataclasses.fields(lm)})
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    block = Block(tokens, at, jnp.zeros(len(tokens), jnp.int32), None, causal=True)
    noted.layers(params, inputs(lm, params, block), 0, lm.num_layers, block, None)
    own = [router(x, block) for router, x in zip(routers, read, strict=True)]
    none = jnp.zeros_like(own[0][0]), jnp.full_like(own[0][1], -1)
    later = [
        [routers[i + j](x, block) if i + j < len(read) else none for j in range(1, ahead + 1)]
        for i, x in enumerate(read)
    ]
    shape = lambda stacked: stacked.reshape(*tokens.shape, *stacked.shape[1:])
    weights, experts = (shape(jnp.stack(part, axis=1)) for part in zip(*own, strict=True))
    foretold = [
        jnp.stack([jnp.stack([each[i] for each in layer], axis=1) for layer in later], axis=1) for i in range(2)
    ]
    return Routing(weights, experts, *map(shape, foretold))
