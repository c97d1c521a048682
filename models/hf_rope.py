"""Ropes in a Hugging Face `config.json`, in the layouts of transformers 4 and 5: base and scaling."""

import math
from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, flag, is_positive, is_size, positive, shown
from specjax.models.ropes import RopeScaling


def from_hf(config: dict[str, Any], max_positions: int, pairs: int = 0) -> tuple[float, RopeScaling | None]:
    """Base and scaling; `rope_scaling` (transformers 4) takes precedence over `rope_parameters` (5), as in transformers
    5.

    Args:
      config: the parsed file.
      max_positions: the number of positions that the model was made for.
      pairs: the number of frequencies for which a `longrope` has factors; 0 if the model may not have one.

    Raises:
      ModelError: on an unsupported rope, and on wrong fields.
    """
    rope = _rope(config)
    theta = next((x for x in (rope.get("rope_theta"), config.get("rope_theta")) if x is not None), 10000.0)
    theta = positive("rope_theta", theta)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"config.json has a rope per layer type ({', '.join(rope)}); only one for all layers is supported"
        )
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if pairs and "longrope" in (rope.get("rope_type"), rope.get("type")):
        return theta, _longrope(rope, original or max_positions, max_positions, pairs)
    return theta, scaling(rope, original or max_positions)


def share(config: dict[str, Any]) -> float:
    """The share of a head that is rotated.

    Raises:
      ModelError: if it is not a valid share.
    """
    part = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part is not None and not (is_positive(part) and part <= 1):
        raise ModelError(f"config.json: partial_rotary_factor must be a share of a head, not {shown(part)}")
    return 1.0 if part is None else float(part)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return an_object(name, config.get(name))


def scaling(rope: dict[str, Any], original: Any) -> RopeScaling | None:
    """The scaling of a rope's frequencies by its own fields; None if they are unscaled.

    Args:
      rope: `rope_scaling`, or `rope_parameters`, of one kind of layer.
      original: the number of positions that the model was first trained for.

    Raises:
      ModelError: on an unsupported type, and on wrong fields.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("llama_4_scaling_beta"):
        raise ModelError(
            f"config.json: llama_4_scaling_beta {shown(rope['llama_4_scaling_beta'])} is not supported: queries are not scaled "
            "by their positions"
        )
    if kind in ("default", "mrope"):  # in text, the three kinds of positions are equal
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


def _dynamic(rope: dict[str, Any], original: Any) -> RopeScaling:
    return RopeScaling("dynamic", float(rope["factor"]))


def _llama3(rope: dict[str, Any], original: Any) -> RopeScaling:
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if not is_size(original) or low > high:
        raise ModelError(
            "config.json: rope type 'llama3' needs a low_freq_factor of at most its high_freq_factor, and a positive integer "
            "for original_max_position_embeddings"
        )
    return RopeScaling("llama3", factor, low, high, original)


def _yarn(rope: dict[str, Any], original: Any) -> RopeScaling:
    """Reads YaRN. A file may give `magnitude` as `attention_factor`, or by DeepSeek's `mscale` and `mscale_all_dim`."""
    factor = float(rope["factor"])
    betas = [positive(name, rope.get(name) or usual) for name, usual in (("beta_fast", 32), ("beta_slow", 1))]
    if not is_size(original) or betas[0] < betas[1]:
        raise ModelError(
            "config.json: rope type 'yarn' needs a beta_slow of at most its beta_fast, and a positive integer for "
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


def _longrope(rope: dict[str, Any], original: Any, most: int, pairs: int) -> RopeScaling:
    factors: dict[str, Any] = {name: rope.get(name) for name in ("short_factor", "long_factor")}
    for name, own in factors.items():
        if not isinstance(own, list) or len(own) != pairs or not all(is_positive(x) for x in own):
            raise ModelError(
                f"config.json: rope type 'longrope' needs {pairs} positive numbers for {name}, not {shown(own)}"
            )
    if not is_size(original):
        raise ModelError(
            f"config.json: original_max_position_embeddings must be a positive integer, not {shown(original)}"
        )
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        scale = rope.get("factor")
        grown = most if scale is None else positive("factor", scale) * original
        magnitude = long_magnitude(grown, original)
    short, long = (tuple(float(x) for x in own) for own in factors.values())
    return RopeScaling(
        "longrope", 1.0, original_max_position_embeddings=original, magnitude=positive("attention_factor", magnitude),
        short_factor=short, long_factor=long,
    )  # fmt: skip


def long_magnitude(most: float, original: int) -> float:
    """The factor of cosines and sines in `longrope`, for a model extended from `original` positions to `most`."""
    return 1.0 if most <= original or original == 1 else math.sqrt(1 + math.log(most / original) / math.log(original))


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], Any], RopeScaling]]] = {
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": (("factor",), _yarn),
    "dynamic": (("factor",), _dynamic),
}
"""For each type: the fields that it needs, and the function that reads them, given the positions of the first
training."""

_WRITTEN = {
    "llama3": {name: name for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")},
    "yarn": {name: name for name in ("beta_fast", "beta_slow", "truncate", "original_max_position_embeddings")}
    | {"attention_factor": "magnitude"},
}
"""For each type: a file's fields besides `factor`, and our names for them."""


def to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling`."""
    if scaling is None:
        return None
    fields = {name: getattr(scaling, own) for name, own in _WRITTEN.get(scaling.kind, {}).items()}
    return {"rope_type": scaling.kind, "factor": scaling.factor} | fields
