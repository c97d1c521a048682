"""Ropes in a Hugging Face `config.json`, in the layouts of transformers 4 and 5: base and scaling."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, is_positive, is_size, positive, shown
from specjax.models.llama_config import RopeScaling

_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


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
    if kind not in _NEEDED:
        raise ModelError(f"config.json asks for rope type {kind!r}; supported are default, linear and llama3")
    missing = [name for name in _NEEDED[kind] if not is_positive(rope.get(name))]
    if missing:
        raise ModelError(f"config.json: rope type {kind!r} needs a positive number for {', '.join(missing)}")
    factor, low, high = (float(rope.get(name, 1.0)) for name in _NEEDED["llama3"])
    if kind == "linear":
        return RopeScaling("linear", factor)
    if not is_size(original) or low >= high:
        raise ModelError(
            "config.json: rope type 'llama3' needs a low_freq_factor below its high_freq_factor, and a positive integer for "
            "original_max_position_embeddings"
        )
    return RopeScaling("llama3", factor, low, high, original)


def to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling`."""
    if scaling is None:
        return None
    written = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return written
