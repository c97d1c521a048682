"""What the description of a model family is made of, and what several of them read and write alike."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.fields import FULL, SLIDING, flag, is_size, layer_kinds, shown
from specjax.models.llama_config import LlamaConfig
from specjax.models.tensors import Tensor

Fields = Callable[[str], Any]
"""A field of `config.json` by name; what transformers assumes where the file leaves it out."""

SILU = {"hidden_act": ("silu",)}


@dataclasses.dataclass(frozen=True)
class Family:
    """What is different in one architecture.

    Attributes:
      architecture: its name in `config.json`.
      usual: fields that transformers assumes where a file leaves them out. The sizes that have no entry are required.
      read: from a file's fields to those of a `LlamaConfig`, beyond the sizes that all have. Where it gives no rope, the whole
        head is rotated by the one rope that the file has.
      write: from a `LlamaConfig` to a file's fields, beyond those that all have. What it cannot say is found by reading again.
      fixed: fields with the values that the loader can serve, the usual one first; see `check_fixed`.
      others: other names that models of these layers and tensors have, whatever else they hold.
      names: of its tensors, from those in Llama's layout.
      layout: of its parameters; see `specjax.models.weights.Layout`.
      text: from a folder's tensors to those that are the model's.
      note: what a file may say besides, for readers.
    """

    architecture: str
    usual: Mapping[str, Any]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[LlamaConfig], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: SILU)
    others: tuple[str, ...] = ()
    names: weights.Names = str
    layout: weights.Layout = weights.hf_name
    text: Callable[[dict[str, Tensor], LlamaConfig], dict[str, Tensor]] = lambda tensors, config: tensors
    note: str = ""


def rope(get: Fields, partial: bool = False, long: int = 0) -> dict[str, Any]:
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
        raise ModelError(f"config.json has partial_rotary_factor {shown(share)}; only whole heads are rotated")
    theta, scaling = hf_rope.from_hf(fields, get("max_position_embeddings"), int(long * share) // 2)
    return {"rope_theta": theta, "rope_scaling": scaling} | ({"partial_rotary_factor": share} if partial else {})


def windows(types: Any, window: Any, layers: int) -> dict[str, Any]:
    """The window, and the layers that use it, from `layer_types`.

    Raises:
      ModelError: where layers have a window that is none.
    """
    uses = [kind == SLIDING for kind in layer_kinds(types, layers)]
    if window is None and any(uses):
        raise ModelError("config.json: layer_types has sliding_attention, but the sliding window is off")
    if window is not None and not is_size(window):
        raise ModelError(f"config.json: sliding_window must be a positive integer or null, not {shown(window)}")
    if not any(uses):
        return {}
    return {"sliding_window": window, "sliding_layers": () if all(uses) else tuple(uses)}


def layer_types(config: LlamaConfig) -> list[str]:
    """What `layer_types` says."""
    return [FULL if config.window(i) is None else SLIDING for i in range(config.num_hidden_layers)]


def attention_bias(get: Fields) -> dict[str, Any]:
    """One switch for the biases of q, k, v and o."""
    biased = flag("attention_bias", get("attention_bias"))
    return {"qkv_bias": biased, "o_bias": biased}


def sparse_layers(config: LlamaConfig) -> list[bool]:
    """Whether each layer has experts."""
    return [config.sparse(i) for i in range(config.num_hidden_layers)]


def joined(name: str, parts: Mapping[str, str]) -> str:
    """The name of a tensor that several parameters share, by the end of the module's name in Llama's layout; see
    `specjax.models.weights.Names`.

    >>> joined("model.layers.3.mlp.up_proj.weight", {"mlp.up_proj": "mlp.gate_up_proj.weight#1"})
    'model.layers.3.mlp.gate_up_proj.weight#1'
    """
    module = name.removesuffix(".weight")
    found = next((ours for ours in parts if module.endswith(f".{ours}")), None)
    return name if found is None else module.removesuffix(found) + parts[found]
