"""The library whose names a tree of arrays has."""

from collections.abc import Mapping
from typing import Any, TypeVar

from specjax.models.jax_folders import gemma, maxtext, tunix
from specjax.models.jax_folders.part import Part, Shapes

LAYOUTS = (maxtext, tunix, gemma)
NAMES = ", ".join(layout.NAME for layout in LAYOUTS)
_PREFIXES = ("params/params/", "params/", "base/", "")  # of a training state, of its parameters, of an NNX module

T = TypeVar("T")


def recognised(arrays: Mapping[str, T]) -> tuple[Any, dict[str, T]] | None:
    """The module of this package that describes a tree, and what is known of each array by its name there.

    None if the names are those of no library.

    Args:
      arrays: by their paths, with parts joined by `/`.
    """
    for prefix in _PREFIXES:
        inside = {_plain(name.removeprefix(prefix)): own for name, own in arrays.items() if name.startswith(prefix)}
        for layout in LAYOUTS:
            if layout.is_one(inside):
                return layout, inside
    return None


def problems_of(layout: Any, shapes: Shapes, parts: Mapping[str, Part]) -> list[str]:
    """What arrays are missing, misshapen or of no use; none for a tree that fits the config."""
    found, expected = [], {part.name: part.shape for part in parts.values()}
    for stored, shape in expected.items():
        if stored not in shapes:
            found.append(f"missing {stored} {list(shape)}")
        elif shapes[stored] != shape:
            found.append(f"{stored} has shape {list(shapes[stored])}, config.json says {list(shape)}")
    spare = [name for name in shapes if name not in expected and not layout.is_unread(name)]
    return found + [f"unused {name} {list(shapes[name])}" for name in spare]


def _plain(name: str) -> str:
    """An array's name without what holds it: a module, and a parameter's box."""
    return name.removeprefix("transformer/").removesuffix("/value").removesuffix("/w")
