"""What a layout of another library says about one parameter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.models.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a checkpoint's arrays, by their names; parts of a name are joined by `/`."""

Named = Mapping[str, tuple[int, ...]]
"""The shapes of our parameters, by their names; parts of a name are joined by `.`."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter's place in a checkpoint.

    Attributes:
      name: of the array that holds it.
      shape: the shape that the array should have.
      take: the parameter's numbers from the whole array, of NumPy or of JAX, in order. Axes that are one in the parameter may
        be several beside each other, as heads and their channels.
      value: the parameter's numbers from those, where the library multiplies them by a factor of its own or adds one to
        them.
    """

    name: str
    shape: tuple[int, ...]
    take: Callable[[Any], Any]
    value: Callable[[np.ndarray], np.ndarray] = lambda x: x


def layer_of(name: str) -> tuple[int, str]:
    """The number of a parameter's layer, and the parameter's name in it; -1 for one that is in no layer.

    >>> layer_of("layers.3.mlp.up.kernel")
    (3, 'mlp.up.kernel')
    """
    first, _, rest = name.partition(".")
    number, _, own = rest.partition(".")
    return (int(number), own) if first == "layers" else (-1, name)


def check_layers(there: int, config: int) -> None:
    """Raises ModelError if a checkpoint has another number of layers than its config.json says."""
    if there != config:
        raise ModelError(f"the checkpoint has {there} layers, and config.json says {config}")
