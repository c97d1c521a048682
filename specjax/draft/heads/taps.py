"""Which of a target's layers an EAGLE-3 head reads. Published files count them in two ways and do not say in which.

An *output* l is the residual stream after layer l, counted from 0. A *boundary* b is the stream that enters layer b,
which is output b - 1. Boundary 0 is the embedding, and boundary L is the stream after the last of L layers, before the
final norm. Our taps are outputs.

Places of the ids, and their readers (code of 2026):

- nowhere: boundaries 2, L // 2, L - 3. SafeAILab/EAGLE keeps the stream before these layers; SpecForge's own default,
  outputs 1, L // 2 - 1, L - 4, is the same.
- `eagle_aux_hidden_state_layer_ids` at the top level: boundaries. speculators writes them, and vLLM uses them as they
  are.
- `target_layer_ids`: outputs (DeepSpec).
- `eagle_config.eagle_aux_hidden_state_layer_ids`: SpecForge writes outputs, as ModelOpt does by default, and SGLang
  adds 1 to them for targets like Llama and Qwen. Files of NVIDIA and of TorchSpec hold boundaries under the same name.
"""

import dataclasses
from typing import Any

IDS = "eagle_aux_hidden_state_layer_ids"
_TOP = (IDS, "aux_hidden_state_layer_ids")
_MODELOPT = frozenset(
    "use_input_layernorm_in_first_layer use_last_layernorm use_mtp_layernorm next_layer_regular parallel_draft_step "
    "parallel_draft_heads_num_layers norm_before_fc".split()
)
"""Keys of an `eagle_config` that NVIDIA's exporter writes beside the ids, and SpecForge does not."""


@dataclasses.dataclass(frozen=True)
class Taps:
    """The layers that a head reads.

    Attributes:
      layers: those whose outputs are fused, ascending.
      why: how that was found, in a few words.
    """

    layers: tuple[int, ...]
    why: str


def read_taps(config: dict[str, Any], layers: int) -> Taps:
    """The taps of an EAGLE-3 head.

    Args:
      config: its `config.json`.
      layers: of the target.

    Raises:
      ValueError: for ids that are not layers of the target.
    """
    for key in _TOP:
        if config.get(key):
            ids = _checked(key, config[key])
            why = f"{key} at the top level are boundaries"
            if ids == _default_outputs(layers):
                why += ", though they look like the default outputs: if few drafts are accepted, set taps"
            return Taps(_from_boundaries(key, ids, layers), why)
    if config.get("target_layer_ids"):
        ids = _checked("target_layer_ids", config["target_layer_ids"])
        return Taps(_from_outputs("target_layer_ids", ids, layers), "target_layer_ids are outputs")
    nested = config.get("eagle_config") or {}
    if nested.get(IDS):
        key, ids = f"eagle_config.{IDS}", _checked(f"eagle_config.{IDS}", nested[IDS])
        boundaries, reason = _nested(ids, nested, layers)
        make = _from_boundaries if boundaries else _from_outputs
        return Taps(make(key, ids, layers), f"{key} are {'boundaries' if boundaries else 'outputs'}, {reason}")
    return Taps(_default_outputs(layers), "no ids: outputs 1, L/2 - 1 and L - 4, as published")


def _nested(ids: tuple[int, ...], config: dict[str, Any], layers: int) -> tuple[bool, str]:
    """Whether ids within an `eagle_config` are boundaries, and why."""
    if ids[-1] == layers or ids[0] == 0:
        return True, f"since {ids[0] if ids[0] == 0 else layers} is no layer's output that a head would read"
    if ids == _default_outputs(layers):
        return False, "since they are the default outputs"
    if ids[0] == 1:
        return False, "since the first is 1"
    if ids == (2, layers // 2, layers - 3):
        return True, "since they are the default boundaries"
    if _MODELOPT & set(config):
        return True, "as NVIDIA writes them"
    return False, "as SpecForge writes them"


def _default_outputs(layers: int) -> tuple[int, ...]:
    return 1, layers // 2 - 1, layers - 4


def _checked(key: str, ids: Any) -> tuple[int, ...]:
    """Ids in the order in which a target computes them, which is the order of every engine's features."""
    whole = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or len(set(ids)) != len(ids):
        raise ValueError(f"{key} must be a list of different layers, not {ids!r}")
    return tuple(sorted(ids))


def _from_boundaries(key: str, ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    _check_range(key, ids, 1, layers)
    return tuple(i - 1 for i in ids)


def _from_outputs(key: str, ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    _check_range(key, ids, 0, layers - 1)
    return ids


def _check_range(key: str, ids: tuple[int, ...], least: int, most: int) -> None:
    if ids[0] == least - 1:
        raise ValueError(f"{key} has {ids[0]}, the embedding, which is not among the features that a target gives")
    if ids[0] < least or ids[-1] > most:
        bad = ids[0] if ids[0] < least else ids[-1]
        raise ValueError(f"{key} has {bad}, and this target has {least} to {most}: the head belongs to another one")
