"""Parameters that are lists of tokens: each is a row of a padded array, as wide as the job's longest list needs."""

import dataclasses
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NONE = -1
"""Pads token ids."""


def tokens(value: Any) -> tuple[int, ...]:
    """Token ids, from a list of them.

    Raises:
      TypeError, ValueError: for anything else.
    """
    if isinstance(value, (str, bytes, dict)):
        raise TypeError("not a list")
    ids = tuple(operator.index(token) for token in value)
    if any(not 0 <= token < 2**31 for token in ids):
        raise ValueError("not token ids")
    return ids


def rounded(count: int) -> int:
    """The next power of two, so that few widths compile; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def ids_array(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """`[R, width]` int32, padded at the end."""
    out = np.full((len(rows), width), NONE, np.int32)
    for row, ids in enumerate(rows):
        out[row, : len(ids)] = ids
    return out


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a parameter that is a list becomes an array.

    Attributes:
      read: from the user's value to a canonical one, empty if it is off; raises TypeError or ValueError.
      widths: of a canonical value.
      array: of canonical values, one per row, and widths that hold them all.
      sizes: the widths of such an array, or tree of arrays; None: the shape of its first array without the rows.
      of_ids: whether every int32 in the array is a token's id, or -1.
    """

    read: Callable[[Any], Any]
    widths: Callable[[Any], tuple[int, ...]]
    array: Callable[[Sequence[Any], tuple[int, ...]], Any]
    sizes: Callable[[Any], tuple[int, ...]] | None = None
    of_ids: bool = True


TOKENS = Shape(tokens, lambda ids: (len(ids),), lambda rows, widths: ids_array(rows, widths[0]))


def JSON(text: str) -> Any:
    """The value of a flag's text."""
    return json.loads(text)


def listing(help: str, valid: str, shape: Shape = TOKENS, switch: bool = True, words: tuple[str, ...] = ()) -> Any:
    """A field that is a list; by default empty, which is off.

    Args:
      help: what it does, in a few words.
      valid: the values that it may have, for errors.
      shape: how it becomes an array.
      switch: whether a list that is not empty turns the warper on.
      words: texts whose last tokens are the list if nobody sets it (None) and there is a tokenizer
        (`specjax.sampling_params.worded`).
    """
    metadata = {"help": help, "valid": valid, "shape": shape, "switch": switch, "metavar": "JSON", "parse": JSON}
    return dataclasses.field(default=None if words else (), metadata={**metadata, "words": words})
