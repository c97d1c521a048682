"""The description of a model family, and the parts that several of them read and write alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.fields import FULL, SLIDING, flag, is_size, layer_kinds, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import ACTIVATIONS, Activation
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig
from specjax.models.tensors import Tensor

_NEW = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu"}
"""Other names of activations in files."""

Fields = Callable[[str], Any]
"""A field of `config.json` by name; what transformers assumes where the file leaves it out."""

SILU = {"hidden_act": ("silu",)}


def rope(get: Fields, partial: bool = False, long: int = 0) -> RopeConfig:
    """One rope for all layers.

    Args:
      get: a field of the file.
      partial: whether the file may say that it rotates a part of each head.
      long: the width of a head whose rope may be `longrope`; 0 where it may not.

    Raises:
      ModelError: on a rope that is not supported, and on wrong fields.
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
    """The differences of one architecture.

    Attributes:
      model_type: its name in `config.json`.
      architecture: that of its class there.
      usual: fields that transformers assumes where a file leaves them out. The sizes that have no entry are required. A
        function makes the value of other fields.
      read: from a file's fields and the Llama of its sizes and rope to the model, by changing the parts of that one.
      write: from a model to a file's fields, beyond those that all have. What it cannot say is found by reading again.
      fixed: fields with the values that the loader can serve, the usual one first; see `check_fixed`.
      others: other names that models of these layers and tensors have, whatever else they hold.
      rope: the rope of all layers, from a file's fields; None where `read` gives each kind of layer its own.
      names: of its tensors, from those in Llama's layout.
      runs: in how many runs the outputs of a shared tensor lie; see `specjax.models.weights.Names`.
      layout: of its parameters; see `specjax.models.weights.Layout`.
      text: from a folder's tensors to those that are the model's.
      fields: the names that files give to fields, by their usual names; the first is written, and none means that the
        family has no such field.
      note: what a file may say besides, for readers.
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
    runs: Callable[[ModelConfig], int] = lambda config: 1
    layout: weights.Layout = weights.hf_name
    text: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]] = lambda tensors, config: tensors
    fields: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
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
        """The names of a model's tensors."""
        runs = self.runs(config)
        if runs == 1:
            return self.names
        in_runs = lambda name: f"{name}/{runs}" if "#" in name else name
        return lambda name: in_runs(self.names(name))


def activation(get: Fields, field: str = "hidden_act") -> Activation:
    """The activation that a field names.

    Raises:
      ModelError: on an activation that is not supported.
    """
    name = get(field)
    own = _NEW.get(str(name), name)
    if own not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {field} {shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
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
    """With the window in the layers that `layer_types` says.

    Raises:
      ModelError: where layers have a window that is none.
    """
    uses = [kind == SLIDING for kind in layer_kinds(types, config.num_hidden_layers)]
    if window is None and any(uses):
        raise ModelError("config.json: layer_types has sliding_attention, but the sliding window is off")
    if window is not None and not is_size(window):
        raise ModelError(f"config.json: sliding_window must be a positive integer or null, not {shown(window)}")
    return mixers(config, lambda i: {"window": window if uses[i] else None})


def mixers(config: ModelConfig, fields: Callable[[int], dict[str, Any]]) -> ModelConfig:
    """With these fields in the mixer of every layer, by its number."""
    change = lambda i, layer: dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **fields(i)))
    return config.each(change)


def sparse(config: ModelConfig, experts: ExpertsConfig, uses: Sequence[bool] | None = None) -> ModelConfig:
    """With experts in the place of the MLPs of the layers that use them; None: of all."""

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        if uses is not None and not uses[i]:
            return layer
        return dataclasses.replace(layer, feed=dataclasses.replace(experts, dense=layer.feed.dense))

    return config.each(change)


def layer_types(config: ModelConfig) -> list[str]:
    """What `layer_types` says."""
    return [FULL if config.window(i) is None else SLIDING for i in range(config.num_hidden_layers)]


def ropes_by_kind(config: ModelConfig) -> dict[str, RopeConfig]:
    """The ropes of layers with a window and of those without; of a kind that is not there the other's."""
    far = next((one for one in config.attentions if one.window is None), config.near)
    return {SLIDING: config.near.rope or RopeConfig(), FULL: far.rope or RopeConfig()}


def rope_parameters(ropes: Mapping[str, RopeConfig]) -> dict[str, Any]:
    """What `rope_parameters` says of ropes by the kind of layer."""
    said = lambda rope: hf_rope.to_hf(rope.scaling) or {"rope_type": "default"}
    return {kind: {"rope_theta": rope.theta} | said(rope) for kind, rope in ropes.items()}


def attention_bias(get: Fields) -> dict[str, Any]:
    """One switch for the biases of q, k, v and o."""
    biased = flag("attention_bias", get("attention_bias"))
    return {"qkv_bias": biased, "o_bias": biased}


def sparse_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has experts."""
    return [layer.experts is not None for layer in config.layers]


def joined(name: str, parts: Mapping[str, str]) -> str:
    """The name of a tensor that several parameters share, by the end of the module's name in Llama's layout; see
    `specjax.models.weights.Names`.

    >>> joined("model.layers.3.mlp.up_proj.weight", {"mlp.up_proj": "mlp.gate_up_proj.weight#1"})
    'model.layers.3.mlp.gate_up_proj.weight#1'
    """
    module = name.removesuffix(".weight")
    found = next((ours for ours in parts if module.endswith(f".{ours}")), None)
    return name if found is None else module.removesuffix(found) + parts[found]
