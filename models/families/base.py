"""The description of a model family, and parts that several families read and write in the same way."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.fields import FULL, SLIDING, flag, is_size, layer_kinds, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig
from specjax.models.tensors import Tensor

Fields = Callable[[str], Any]
"""A function that returns a field of `config.json` by name, with transformers' default if the file omits it."""

SILU = {"hidden_act": ("silu",)}


def rope(get: Fields, partial: bool = False, long: int = 0) -> RopeConfig:
    """One rope for all layers.

    Args:
      get: returns a field of the file.
      partial: whether the file may rotate only a part of each head.
      long: the width of a head whose rope may be `longrope`; 0 if it may not.

    Raises:
      ModelError: on an unsupported rope, and on wrong fields.
    """
    names = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )
    fields = {name: get(name) for name in names}
    share = hf_rope.share(fields)
    if share != 1 and not partial:
        raise ModelError(
            f"config.json has partial_rotary_factor {shown(share)}; only ropes over whole heads are supported"
        )
    theta, scaling = hf_rope.from_hf(fields, get("max_position_embeddings"), int(long * share) // 2)
    return RopeConfig(theta, scaling, share)


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of one architecture from Llama.

    Attributes:
      model_type: its name in `config.json`.
      architecture: the name of its class there.
      usual: transformers' defaults for fields that a file omits. Sizes without an entry are required.
      read: makes the model from a file's fields and the Llama of its sizes and rope, by changing parts of that.
      write: makes a file's fields from a model, beyond those that all families have. Parts that it cannot express are
        detected by reading the result again.
      fixed: fields with the values that the loader supports, the default first; see `check_fixed`.
      others: other names of models with these layers and tensors, whatever else those models contain.
      rope: makes the rope of all layers from a file's fields; None if `read` gives each kind of layer its own.
      names: maps the names of tensors in Llama's layout to its own.
      layout: the layout of its parameters; see `specjax.models.weights.Layout`.
      text: selects the model's tensors from a folder's.
      note: what else a file may say, for readers.
    """

    model_type: str
    architecture: str
    usual: Mapping[str, Any]
    read: Callable[[Fields, ModelConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: SILU)
    others: tuple[str, ...] = ()
    rope: Callable[[Fields], RopeConfig] | None = rope
    names: weights.Names = str
    layout: weights.Layout = weights.hf_name
    text: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]] = lambda tensors, config: tensors
    note: str = ""


def windows(config: ModelConfig, types: Any, window: Any) -> ModelConfig:
    """The config with the window in the layers that `layer_types` names.

    Raises:
      ModelError: if layers should have a window and there is none.
    """
    uses = [kind == SLIDING for kind in layer_kinds(types, config.num_hidden_layers)]
    if window is None and any(uses):
        raise ModelError("config.json: layer_types has sliding_attention, but the sliding window is off")
    if window is not None and not is_size(window):
        raise ModelError(f"config.json: sliding_window must be a positive integer or null, not {shown(window)}")
    return mixers(config, lambda i: {"window": window if uses[i] else None})


def mixers(config: ModelConfig, fields: Callable[[int], dict[str, Any]]) -> ModelConfig:
    """The config with these fields in the mixer of every layer, by its number."""
    change = lambda i, layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **fields(i)))
    return config.each(change)


def sparse(config: ModelConfig, experts: ExpertsConfig, uses: Sequence[bool] | None = None) -> ModelConfig:
    """The config with experts in place of the MLPs of the layers that use them; None: of all layers."""

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        if uses is not None and not uses[i]:
            return layer
        return dataclasses.replace(layer, feed=dataclasses.replace(experts, dense=layer.feed.dense))

    return config.each(change)


def layer_types(config: ModelConfig) -> list[str]:
    """The value of `layer_types`."""
    return [FULL if config.window(i) is None else SLIDING for i in range(config.num_hidden_layers)]


def ropes_by_kind(config: ModelConfig) -> dict[str, RopeConfig]:
    """The ropes of layers with a window and of layers without; a missing kind has the other's rope."""
    far = next((one for one in config.attentions if one.window is None), config.near)
    return {SLIDING: config.near.rope or RopeConfig(), FULL: far.rope or RopeConfig()}


def rope_parameters(ropes: Mapping[str, RopeConfig]) -> dict[str, Any]:
    """The value of `rope_parameters` for ropes by the kind of layer."""
    said = lambda rope: hf_rope.to_hf(rope.scaling) or {"rope_type": "default"}
    return {kind: {"rope_theta": rope.theta} | said(rope) for kind, rope in ropes.items()}


def attention_bias(get: Fields) -> dict[str, Any]:
    """The biases of q, k, v and o, which share one switch."""
    biased = flag("attention_bias", get("attention_bias"))
    return {"qkv_bias": biased, "o_bias": biased}


def sparse_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has experts."""
    return [layer.experts is not None for layer in config.layers]


def joined(name: str, parts: Mapping[str, str]) -> str:
    """The name of a tensor that several parameters share; see `specjax.models.weights.Names`.

    `parts` maps the ends of modules' names in Llama's layout.

    >>> joined("model.layers.3.mlp.up_proj.weight", {"mlp.up_proj": "mlp.gate_up_proj.weight#1"})
    'model.layers.3.mlp.gate_up_proj.weight#1'
    """
    module = name.removesuffix(".weight")
    found = next((ours for ours in parts if module.endswith(f".{ours}")), None)
    return name if found is None else module.removesuffix(found) + parts[found]
