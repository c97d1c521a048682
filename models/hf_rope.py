"""Ropes in a Hugging Face `config.json`, in the layouts of transformers 4 and 5: base and scaling."""

import math
from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, flag, is_positive, is_size, positive, shown
from specjax.models.llama_config import RopeScaling


def from_hf(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling; `rope_scaling` (transformers 4) goes before `rope_parameters` (5), as in transformers 5.

    Args:
      config: the parsed file.
      max_positions: the positions that a model was made for.

    Raises:
      ModelError: on a rope that is not supported, and on wrong fields.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = an_object(name, config.get(name))
    theta = next((x for x in (rope.get("rope_theta"), config.get("rope_theta")) if x is not None), 10000.0)
    theta = positive("rope_theta", theta)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"config.json has a rope of its own per layer type ({', '.join(rope)}); one for all is supported"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json has partial_rotary_factor {shown(partial)}; only whole heads are rotated")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return theta, scaling(rope, original or max_positions)


def scaling(rope: dict[str, Any], original: Any) -> RopeScaling | None:
    """What a rope's own fields make of its frequencies; None where they stay.

    Args:
      rope: `rope_scaling`, or `rope_parameters`, of one kind of layer.
      original: the positions that a model was first trained for.

    Raises:
      ModelError: on a type that is not supported, and on wrong fields.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if str(kind) not in _KINDS:
        raise ModelError(f"config.json asks for rope type {shown(kind)}; supported are default, {', '.join(_KINDS)}")
    needed, read = _KINDS[kind]
    missing = [name for name in needed if not is_positive(rope.get(name))]
    if missing:
        raise ModelError(f"config.json: rope type {kind!r} needs a positive number for {', '.join(missing)}")
    return read(rope, original)


def _linear(rope: dict[str, Any], original: Any) -> RopeScaling:
    return RopeScaling("linear", float(rope["factor"]))


def _llama3(rope: dict[str, Any], original: Any) -> RopeScaling:
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if not is_size(original) or low >= high:
        raise ModelError(
            "config.json: rope type 'llama3' needs a low_freq_factor below its high_freq_factor, and a positive integer for "
            "original_max_position_embeddings"
        )
    return RopeScaling("llama3", factor, low, high, original)


def _yarn(rope: dict[str, Any], original: Any) -> RopeScaling:
    """A file may say `magnitude` as `attention_factor`, or by DeepSeek's `mscale` and `mscale_all_dim`."""
    factor = float(rope["factor"])
    betas = [positive(name, rope.get(name) or usual) for name, usual in (("beta_fast", 32), ("beta_slow", 1))]
    if not is_size(original) or betas[0] <= betas[1]:
        raise ModelError(
            "config.json: rope type 'yarn' needs a beta_slow below its beta_fast, and a positive integer for "
            "original_max_position_embeddings"
        )
    grown = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
    magnitude = grown(1.0)
    if rope.get("attention_factor") is not None:
        magnitude = positive("attention_factor", rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        magnitude = grown(positive("mscale", rope["mscale"])) / grown(
            positive("mscale_all_dim", rope["mscale_all_dim"])
        )
    truncate = rope.get("truncate") is None or flag("truncate", rope["truncate"])
    return RopeScaling(
        "yarn", factor, original_max_position_embeddings=original, beta_fast=betas[0], beta_slow=betas[1], truncate=truncate,
        magnitude=magnitude,
    )  # fmt: skip


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], Any], RopeScaling]]] = {
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (("factor",), _yarn),
}
"""Of every type the fields that it needs, and what reads them with the positions of the first training."""

_WRITTEN = {
    "linear": {},
    "llama3": {name: name for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")},
    "yarn": {name: name for name in ("beta_fast", "beta_slow", "truncate", "original_max_position_embeddings")}
    | {"attention_factor": "magnitude"},
}
"""Of every type what a file says besides `factor`, and our names for it."""


def to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling`."""
    if scaling is None:
        return None
    fields = {name: getattr(scaling, own) for name, own in _WRITTEN[scaling.kind].items()}
    return {"rope_type": scaling.kind, "factor": scaling.factor} | fields
