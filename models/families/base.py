"""The description of a model family, and parts that several families read and write in the same way."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.fields import FULL, SLIDING, an_object, flag, is_size, layer_kinds, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import ACTIVATIONS, Activation
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig
from specjax.models.tensors import Tensor

_NEW = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu"}
"""Other names of activations in files."""

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
      usual: transformers' defaults for fields that a file omits. Sizes without an entry are required. A function makes
        the value of other fields.
      read: makes the model from a file's fields and the Llama of its sizes and rope, by changing parts of that.
      write: makes a file's fields from a model, beyond those that all families have. Parts that it cannot express are
        detected by reading the result again.
      fixed: fields with the values that the loader supports, the default first; see `check_fixed`.
      others: other names of models with these layers and tensors, whatever else those models contain.
      rope: makes the rope of all layers from a file's fields; None if `read` gives each kind of layer its own.
      names: maps the names of tensors in Llama's layout to its own.
      runs: in how many runs the outputs of a shared tensor lie, by its name; see `specjax.models.weights.Names`.
      interleaved: whether its ropes turn neighbouring channels; see `names_of`.
      layout: the layout of its parameters; see `specjax.models.weights.Layout`.
      text: selects the model's tensors from a folder's.
      fields: the names that files give to fields, by their usual names; the first is written, and none means that the
        family has no such field.
      by_layer: sizes that a file may give as a list, with one for each layer; `read` gets the list, and the Llama has the
        first.
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
    runs: Callable[[ModelConfig, str], int] = lambda config, name: 1
    interleaved: bool = False
    layout: weights.Layout = weights.hf_name
    text: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]] = lambda tensors, config: tensors
    fields: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    by_layer: tuple[str, ...] = ()
    note: str = ""

    def renamed(self, given: dict[str, Any]) -> dict[str, Any]:
        """A file's fields under their usual names."""
        own = {name for names in self.fields.values() for name in names}
        out = {name: value for name, value in given.items() if name not in own and name not in self.fields}
        found = {usual: [given[name] for name in names if name in given] for usual, names in self.fields.items()}
        return out | {usual: values[0] for usual, values in found.items() if values}

    def named(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields under the names that its files give them; the inverse of `renamed`."""
        names = {name: self.fields.get(name, (name,)) for name in fields}
        return {names[name][0]: value for name, value in fields.items() if names[name]}

    def names_of(self, config: ModelConfig) -> weights.Names:
        """The names of a model's tensors: `names` with the runs, and with the marks of the rows of queries and keys that
        its ropes turn in neighbouring pairs.

        Those rows, and their biases and norms, are put into halves as they are read, and back as they are written. Scores
        are sums over a head's channels, so they stay the same.
        """
        runs = lambda name: self.runs(config, name) if "#" in name else 1
        in_runs = lambda name: name if runs(name) == 1 else f"{name}/{runs(name)}"
        pairs = functools.partial(_pairs, config=config) if self.interleaved else lambda name: ""
        return lambda name: in_runs(self.names(name)) + pairs(name)


_OF_MIXER = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(\w+)\.")


def _pairs(name: str, config: ModelConfig) -> str:
    """The mark of a tensor in Llama's layout whose rows are turned in pairs; see `specjax.models.weights.Names`."""
    found = _OF_MIXER.match(name)
    mixer = None if found is None else config.slot_mixer(int(found[1]))
    rows = None if found is None or mixer is None else mixer.turned(found[2])
    if rows is None:
        return ""
    before, turned, width = rows
    return f"%{before}+{turned}/{width}" if before else f"%{turned}/{width}"


_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_TEXT = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "mm_projector.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
)


def text_part(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder's text model, under the names of a text-only model; those that read images or sound are left
    out."""
    found = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_NOT_TEXT):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found


def activation(get: Fields, field: str = "hidden_act") -> Activation:
    """The activation that a field names.

    Raises:
      ModelError: on an activation that is not supported.
    """
    name = get(field)
    own = _NEW.get(str(name), name)
    if not isinstance(own, str) or own not in ACTIVATIONS:
        raise ModelError(f"config.json: {field} {shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return own


def renamed(name: str, modules: Mapping[str, str], outer: Mapping[str, str]) -> str:
    """The name of a tensor in a layout that names modules otherwise.

    Args:
      name: in Llama's layout.
      modules: the modules of a layer, by their names in Llama's layout; a `#` is as in `specjax.models.weights.Names`.
      outer: the modules outside layers; `model.layers` is where the layers are.

    >>> renamed("model.layers.3.self_attn.k_proj.bias", {"self_attn.k_proj": "attn.c_attn#1"}, {"model.layers": "h"})
    'h.3.attn.c_attn.bias#1'
    """
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{outer.get(module, module)}.{kind}"
    number, own = module.removeprefix("model.layers.").split(".", 1)
    own, mark, part = modules.get(own, own).partition("#")
    return f"{outer.get('model.layers', 'model.layers')}.{number}.{own}.{kind}{mark}{part}"


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


def rotates(get: Fields, ones: Any, layers: int) -> tuple[bool, ...]:
    """Which layers have positions, from `no_rope_layers` `ones`, which has 1 for those; None: all but every
    `no_rope_layer_interval`th.

    Raises:
      ModelError: on wrong fields.
    """
    every = get("no_rope_layer_interval")
    if not is_size(every):
        raise ModelError(f"config.json: no_rope_layer_interval must be a number of layers, not {shown(every)}")
    ones = [int((i + 1) % every != 0) for i in range(layers)] if ones is None else ones
    if not isinstance(ones, list) or len(ones) < layers or any(one not in (0, 1) for one in ones):
        raise ModelError(f"config.json: no_rope_layers must have 0 or 1 for each layer, not {shown(ones)}")
    return tuple(bool(one) for one in ones[:layers])


def mixers(config: ModelConfig, fields: Callable[[int], dict[str, Any]]) -> ModelConfig:
    """The config with these fields in the mixer of every layer, by its number."""
    change = lambda i, layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **fields(i)))
    return config.each(change)


def sparse(config: ModelConfig, experts: ExpertsConfig, uses: Sequence[bool] | None = None) -> ModelConfig:
    """The config with experts in place of the MLPs of the layers that use them; None: of all layers."""

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        if uses is not None and not uses[i]:
            return layer
        dense = None if layer.feed is None else layer.feed.dense
        return dataclasses.replace(layer, feed=dataclasses.replace(experts, dense=dense))

    return config.each(change)


def layer_types(config: ModelConfig) -> list[str]:
    """The value of `layer_types`."""
    return [FULL if config.window(i) is None else SLIDING for i in range(config.num_hidden_layers)]


def ropes_by_kind(config: ModelConfig) -> dict[str, RopeConfig]:
    """The ropes of layers with a window and of layers without; a missing kind has the other's rope."""
    far = next((one for one in config.attentions if one.window is None), config.near)
    return {SLIDING: config.near.rope or RopeConfig(), FULL: far.rope or RopeConfig()}


def rope_fields(get: Fields, usual: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a file says of its rope, or the usual of a family where it describes none: `rope_theta` beside it does not
    count, as in transformers."""
    name = "rope_scaling" if get("rope_scaling") else "rope_parameters"
    return an_object(name, get(name)) or usual or {}


def with_rope(get: Fields, said: dict[str, Any]) -> Fields:
    """The fields of a file that says this of its rope."""
    own = {"rope_scaling": None, "rope_parameters": said}
    return lambda name: own[name] if name in own else get(name)


def said(rope: RopeConfig) -> dict[str, Any]:
    """What `rope_parameters` says of one rope."""
    return {"rope_theta": rope.theta} | (hf_rope.to_hf(rope.scaling) or {"rope_type": "default"})


def rope_parameters(ropes: Mapping[str, RopeConfig]) -> dict[str, Any]:
    """The value of `rope_parameters` for ropes by the kind of layer."""
    return {kind: said(rope) for kind, rope in ropes.items()}


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
