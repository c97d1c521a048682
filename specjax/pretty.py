"""States and trees as text: shapes and types in place of numbers, so that nothing is computed, copied or awaited."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

LONGEST = 60  # characters of a plain value
WIDTH = 100


class Pretty:
    """A base for dataclasses: their `repr`, and the one of their subclasses, is `pretty`."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "__repr__" not in vars(
            cls
        ):  # set on the class itself; otherwise the `dataclass` decorator would write one there
            cls.__repr__ = Pretty.__repr__

    def __repr__(self) -> str:
        return pretty(self)


def pretty(value: Any, indent: int = 0) -> str:
    """A pytree as text: on one line if it fits, otherwise one line for each part.

    Args:
      value: dataclasses, mappings and sequences of arrays and other values.
      indent: the column at which its first line begins.

    >>> pretty({"a": (1, 2.5), "b": None})
    '{a: (1, 2.5), b: None}'
    """
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "key" if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value.dtype.name
        return f"{kind}[{','.join(map(str, value.shape))}]"
    inner = indent + 2
    if dataclasses.is_dataclass(value):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        parts = [f"{name}={pretty(getattr(value, name), inner)}" for name in shown]
        return _joined(type(value).__name__ + "(", parts, ")", indent)
    if isinstance(value, Mapping):
        return _joined("{", [f"{name}: {pretty(part, inner)}" for name, part in value.items()], "}", indent)
    if isinstance(value, list | tuple) and any(_holds(part) for part in value):
        ends = "[]" if isinstance(value, list) else "()"
        return _joined(ends[0], list(_counted(pretty(part, inner) for part in value)), ends[1], indent)
    return short(value)


def _holds(value: Any) -> bool:
    """Whether it is more than a plain value."""
    return hasattr(value, "dtype") or dataclasses.is_dataclass(value) or isinstance(value, Mapping | list | tuple)


def _counted(parts: Iterable[str]) -> Iterable[str]:
    """Equal neighbours once, with their number: the layers of a cache."""
    for text, group in itertools.groupby(parts):
        count = len(list(group))
        yield f"{count} x {text}" if count > 1 else text


def _joined(head: str, parts: list[str], tail: str, indent: int) -> str:
    line = head + ", ".join(parts) + tail
    if indent + len(line) <= WIDTH and "\n" not in line:
        return line
    return "".join([head, *(f"\n{' ' * (indent + 2)}{part}," for part in parts), f"\n{' ' * indent}{tail}"])


def brief(value: Any) -> str:
    """A decoder as text: one line for each part that is not at its default, cut short if it is too long."""
    parts = [f"{name}={_line(part)}" for name, part in _changed(value)]
    return _joined(type(value).__name__ + "(", [_cut(part, WIDTH - 3) for part in parts], ")", 0)


def _line(value: Any) -> str:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return short(value)
    return f"{type(value).__name__}({', '.join(f'{name}={_line(part)}' for name, part in _changed(value))})"


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that are not at their defaults."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.repr and (field.default is dataclasses.MISSING or part != field.default):
            yield field.name, part


def _cut(text: str, room: int) -> str:
    """The text, cut short if it is longer than `room`; brackets that are open at the cut are closed."""
    if len(text) <= room:
        return text
    kept = text[: room - 6].rpartition(", ")[0]
    return f"{kept}, ...{')' * (kept.count('(') - kept.count(')'))}"


def short(value: Any, room: int = LONGEST) -> str:
    """The `repr` of a value; its middle is left out if it is longer than `room` characters."""
    text = repr(value)
    return text if len(text) <= room else f"{text[: room // 2]}...{text[-room // 4 :]}"
