"""Wider models that write the same text, to measure the cost of real sizes with small weights.

Every vector of a widened model is `k` copies of the plain model's vector (Net2Net's idea, arXiv:1511.05641, with equal
shares). A layer that reads a vector reads k copies and divides by k. The norm over copies equals the norm over one.
Query heads and kv-heads are copied as whole groups, so that a query head finds a copy of its kv-head.

Shapes: `E` width, `F` the MLP's, `N` heads, `K` kv-heads, `H` head width, `V` vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.formats import check_plain
from specjax.models.llama import LlamaLM
from specjax.models.mlp import MLPConfig
from specjax.models.model import Model
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig

Array = jax.Array
PyTree = Any

_OF_A_HEAD = ("q_norm", "k_norm")  # norms over H, which stay
_VOCABULARY = ("head", "heads", "pair")  # modules whose outputs are tokens
_JOINED = (
    "fc",
    "fc_norm",
    "share",
    "input",
    "augment_next",
    "q",
    "k",
    "v",
    "up",
    "trigram",
    "narrow",
    "pair",
)  # modules that may read several vectors of width E
_SPLIT = ("down", "trigram")  # modules that may write several


def widen(model: Model, k: int) -> Model:
    """A model k times as wide that writes the same text, to measure the cost of a size.

    Width, MLP and groups of query and kv-heads grow by k; head width and vocabulary stay. So a layer's kernels have k^2
    times as many numbers, and vocabulary tables k times. Division by a power of two does not round.

    Args:
      model: a model of the Llama family from `load`, autoregressive or for masked diffusion.
      k: the factor; 1 changes nothing.

    Raises:
      ModelError: on k below 1, and on a model of another family, with experts, an encoder, inputs per layer, several
        residual streams or other mixers than attention, or without weights.
    """
    check_times(k)
    if not isinstance(model.lm, LlamaLM):
        raise ModelError(
            f"{model.name} cannot be widened: models of the Llama family can, and this is a {type(model.lm).__name__}"
        )
    if model.lm.config.experts is not None:
        raise ModelError(f"{model.name} cannot be widened: its layers have experts")
    if model.lm.encodes:
        raise ModelError(f"{model.name} cannot be widened: it has an encoder")
    if model.lm.config.embedding.layer_inputs is not None or model.lm.config.embedding.streams:
        raise ModelError(
            f"{model.name} cannot be widened: its layers have inputs of their own, or several residual streams"
        )
    if len(model.lm.config.attentions) < model.lm.num_layers:
        raise ModelError(
            f"{model.name} cannot be widened: its layers have other mixers than attention (AttentionConfig)"
        )
    if model.abstract:
        raise ModelError(f"{model.name} has no weights to widen: load it with them")
    if k == 1:
        return model
    check_plain(model.params, "are not widened")
    params = tiled(model.params, k, model.lm.config.hidden_size)
    return dataclasses.replace(model, lm=wider_lm(model.lm, k), params=params, name=f"{model.name} widened {k} times")


def check_times(k: int) -> None:
    """Raises ModelError unless `k` is a whole number of at least 1."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ModelError(f"a model is widened a whole number of times, at least 1, not {k!r}")


def wider_config(config: ModelConfig, k: int) -> ModelConfig:
    """The config of a widened model. A tied table is not divided by k, because it also embeds, so its logits are."""
    times = lambda *names: lambda part: dataclasses.replace(part, **{name: k * getattr(part, name) for name in names})
    wide = config.mapped(AttentionConfig, times("num_attention_heads", "num_key_value_heads"))
    wide = dataclasses.replace(wide.mapped(MLPConfig, times("intermediate_size")), hidden_size=k * config.hidden_size)
    wide = wide if config.embedding.width is None else wide.mapped(EmbeddingConfig, times("width"))
    return wide.mapped(HeadConfig, times("logits_scaling")) if config.head.tied else wide


def wider_lm(lm: LlamaLM, k: int) -> LlamaLM:
    """The functions of a widened model."""
    return dataclasses.replace(lm, config=wider_config(lm.config, k))


def untied(lm: LlamaLM, params: PyTree) -> tuple[LlamaLM, PyTree]:
    """The same model with its own head, which includes the division of logits, because no format of `save` can store
    that."""
    config = lm.config
    head = params["embed"]["embedding"].T if config.head.tied else params["head"]["kernel"]
    whole = config.every(HeadConfig, tied=False, logits_scaling=1.0)
    own = {**params.get("head", {}), "kernel": head / config.head.logits_scaling}
    return dataclasses.replace(lm, config=whole), {**params, "head": own}


@functools.partial(jax.jit, static_argnames=("k", "width"))
def tiled(params: PyTree, k: int, width: int) -> PyTree:
    """Parameters of a widened model or of a drafter's head, whose modules are named alike.

    Args:
      params: nested dicts and lists; integer arrays (ids of a draft's vocabulary) stay.
      k: the factor.
      width: E before widening. A module may read several concatenated vectors of this width. Then each is tiled by
        itself, so that every part is a widened vector.

    Raises:
      ModelError: on a parameter of a kind that no rule covers.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _tiled(path, x, k, width), params)


def tiled_rows(module: PyTree, at: int, k: int, width: int) -> PyTree:
    """A module whose `kernel` reads a vector of the model's width beside other numbers: only that vector's rows are tiled.

    Args:
      module: {`kernel` `[I, O]`, ...}.
      at: the first of these rows.
      k: the factor.
      width: E before widening.
    """
    before, own, after = jnp.split(module["kernel"], (at, at + width))
    return {**module, "kernel": jnp.concatenate([before, jnp.tile(own, (k, 1)) / k, after])}


def _tiled(path: tuple[Any, ...], x: Array, k: int, width: int) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    *_, module, kind = ["", *(str(key.key) for key in path if hasattr(key, "key"))]
    of_tokens = module in _VOCABULARY
    parts = lambda modules, axis: _parts(path, x.shape[axis], width) if module in modules else 1
    match kind:
        case "embedding" | "embeddings":
            return _copies(x, x.ndim - 1, k)
        case "kernel" | "shortcut":
            inputs = _copies(x, 0, k, parts(_JOINED, 0)) / k
            return inputs if of_tokens else _copies(inputs, 1, k, parts(_SPLIT, 1))
        case "bias" | "shortcut_bias":
            return x if of_tokens or module in _OF_A_HEAD else _copies(x, 0, k, parts(_SPLIT, 0))
        case "scale":
            return x if module in _OF_A_HEAD else _copies(x, 0, k, parts(_JOINED, 0))
    raise ModelError(f"no rule widens the parameter {jax.tree_util.keystr(path)}")


def _parts(path: tuple[Any, ...], size: int, width: int) -> int:
    """How many vectors of the model's width a module reads or writes, if it does so with `size` numbers."""
    if size % width:
        raise ModelError(
            f"{jax.tree_util.keystr(path)} reads or writes {size} numbers, which is not a multiple of the width {width}"
        )
    return size // width


def _copies(x: Array, axis: int, k: int, parts: int = 1) -> Array:
    """k copies of every part of an axis, side by side."""
    split = x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])
    repeats = [k if i == axis + 1 else 1 for i in range(split.ndim)]
    return jnp.tile(split, repeats).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
