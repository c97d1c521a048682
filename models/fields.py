"""Checks of the fields of a `config.json`: an error names a field with a wrong type or an unreasonable value."""

from typing import Any, TypeGuard

from specjax.models.errors import ModelError

MOST_LAYERS = 1000
"""The most layers. No published model has a fifth of it, and the time to read a config grows with its layers."""
MOST_EXPERTS = 100_000
"""The most experts of a layer; a checkpoint has at least one tensor for each."""
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
"""The names in `layer_types` of a layer with a window, of one that attends to everything, and of one that sees chunks."""
_MOST = 2**31 - 1  # what an index of 32 bits can count
_LARGEST = 3e38  # what float32 holds


def is_size(value: Any) -> TypeGuard[int]:
    """Whether it is a size: an integer from 1 to 2^31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST


def is_id(value: Any) -> TypeGuard[int]:
    """Whether it may be the id of a token."""
    return is_size(value) or (isinstance(value, int) and not isinstance(value, bool) and value == 0)


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether it is a number above 0 that float32 can represent."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def positive(name: str, value: Any) -> float:
    """A number above 0.

    Raises:
      ModelError: if it is not one.
    """
    if not is_positive(value):
        raise ModelError(f"config.json: {name} must be a positive number, not {shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or false; false where it is None.

    Raises:
      ModelError: on anything else.
    """
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {name} must be true or false, not {shown(value)}")
    return bool(value)


def check_fixed(config: dict[str, Any], fixed: dict[str, tuple[Any, ...]], family: str) -> None:
    """Raises ModelError if a field has a value that its family never has; the first allowed value is the default."""
    for name, allowed in fixed.items():
        if name in config and config[name] not in allowed:
            raise ModelError(
                f"config.json: {name} {shown(config[name])} is not supported; {family} has {shown(allowed[0])}"
            )


def an_object(name: str, value: Any) -> dict[str, Any]:
    """A JSON object; an empty one where it is None.

    Raises:
      ModelError: on anything else.
    """
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json: {name} must be an object, not {shown(value)}")
    return value or {}


def layer_kinds(types: Any, layers: int, near: str = SLIDING) -> list[str]:
    """`layer_types`: for every layer, `near` or `FULL`.

    Raises:
      ModelError: on any other value.
    """
    if not isinstance(types, list):
        raise ModelError(f"config.json: layer_types must have {near} or {FULL} for each layer, not {shown(types)}")
    unknown = sorted({str(kind) for kind in types} - {near, FULL})
    if unknown or len(types) != layers:
        what = f"has unknown kinds: {', '.join(unknown)}" if unknown else f"names {len(types)} of {layers} layers"
        raise ModelError(f"config.json: layer_types {what}; use {FULL} or {near} for each layer")
    return list(types)


def check_depth(layers: int) -> None:
    """Raises ModelError for more layers than any model has."""
    if layers > MOST_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers is {layers}; models of up to {MOST_LAYERS} layers are read")


def shown(value: Any) -> str:
    """A value as an error message shows it, cut to part of a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
