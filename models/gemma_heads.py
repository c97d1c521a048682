"""Reads and writes the attention of Gemma 4's two kinds of layers in the `text_config` of its config files."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import FULL, SLIDING, an_object, is_positive, is_size, layer_kinds, positive, shown

KINDS = (SLIDING, FULL)
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention of one kind of layer.

    Attributes:
      head_dim: width of a head.
      num_key_value_heads: the number of heads of keys and values.
      rope_theta: base of the rotary embedding.
      rotated: how many of a head's `head_dim / 2` pairs are rotated, fastest first; the others carry no position.
      rope_factor: divides positions.
    """

    head_dim: int
    num_key_value_heads: int
    rope_theta: float
    rotated: int
    rope_factor: float = 1.0


def layer_types(types: Any, layers: int) -> list[str]:
    """The kind of every layer. By default every sixth layer attends to everything; the last layer always does."""
    types = [SLIDING if (i + 1) % 6 else FULL for i in range(layers)] if types is None else types
    return [*layer_kinds(types, layers)[:-1], FULL]


def heads_of(kind: str, get: Callable[[str], Any], types: list[str]) -> Heads:
    """The attention of one kind of layer, from `per_layer_config` or, in older files, `global_head_dim` and the like.

    Args:
      kind: `SLIDING` or `FULL`.
      get: returns a field of `text_config` by name.
      types: the kind of every layer.

    Raises:
      ModelError: on fields that are unsupported or inconsistent.
    """
    usual = {"head_dim": get("head_dim"), "num_key_value_heads": get("num_key_value_heads")}
    per_layer = get("per_layer_config")
    if per_layer is None:
        shared = get("num_global_key_value_heads") or usual["num_key_value_heads"]
        found = [usual if kind == SLIDING else {"head_dim": get("global_head_dim"), "num_key_value_heads": shared}]
    else:
        numbered = _numbered(per_layer)
        found = [usual | numbered.get(i, {}) for i, own in enumerate(types) if own == kind]
    own = found[0] if found else usual
    if any(other != own for other in found) or set(own) != set(usual):
        raise ModelError(
            f"config.json: per_layer_config must give all {kind} layers one head_dim and num_key_value_heads, and nothing else"
        )
    width, shared, heads = own["head_dim"], own["num_key_value_heads"], get("num_attention_heads")
    if not is_size(width) or width % 2:
        raise ModelError(f"config.json: head_dim of {kind} layers must be even, got {width!r}")
    if not is_size(shared) or heads % shared:
        raise ModelError(f"config.json: {heads} attention heads do not split over {shared!r} key-value heads")
    ropes = an_object("rope_parameters", get("rope_parameters"))
    rope = an_object(f"rope_parameters.{kind}", ropes.get(kind)) or _ROPES[kind]
    part, form = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    whole = is_positive(part) and part <= 1
    if not whole or form not in ("default", "proportional") or (form == "default" and part != 1):
        raise ModelError(
            f"config.json: rope of {kind} layers has type {form!r} with partial_rotary_factor {shown(part)}; supported are "
            "default over whole heads, and proportional"
        )
    factor = positive("rope factor", rope.get("factor", 1.0)) if form == "proportional" else 1.0
    return Heads(width, shared, positive("rope_theta", rope.get("rope_theta")), int(part * width // 2), factor)


def _numbered(per_layer: Any) -> dict[int, dict[str, Any]]:
    """`per_layer_config` by layer number. With more than ten layers, transformers writes "05"."""
    found = an_object("per_layer_config", per_layer)
    if wrong := [name for name in found if not name.isdecimal()]:
        raise ModelError(f"config.json: per_layer_config has {shown(wrong[0])}, which is not a layer's number")
    return {int(name): an_object(f"per_layer_config.{name}", own) for name, own in found.items()}


def ropes_to_hf(sliding: Heads, full: Heads) -> dict[str, dict[str, Any]]:
    """`rope_parameters` of both kinds of layers."""
    ropes = {}
    for kind, heads in zip(KINDS, (sliding, full), strict=True):
        whole = 2 * heads.rotated == heads.head_dim and heads.rope_factor == 1
        ropes[kind] = {"rope_type": "default" if whole else "proportional", "rope_theta": heads.rope_theta}
        if not whole:
            part = 2 * heads.rotated / heads.head_dim
            factor = {} if heads.rope_factor == 1 else {"factor": heads.rope_factor}
            ropes[kind] |= {"partial_rotary_factor": part} | factor
    return ropes
