"""Sampling parameters: one traced array a name, one entry a row; and the one table of them as plain numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def parameter(default: float, help: str, valid: str, holds: Callable[[Any], Any]) -> Any:
    """A field that is a number.

    Args:
      default: its value where nobody sets it.
      help: what it does, in a few words.
      valid: the values that it may have, for errors.
      holds: whether a value, or each of an array of them, is one of those.
    """
    return dataclasses.field(default=default, metadata={"help": help, "valid": valid, "holds": holds})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one row draws its tokens; the fields are those of `Sampling`, where they are explained."""

    temperature: float = parameter(0.0, "0 is greedy", "a finite number >= 0", lambda x: (x >= 0) & np.isfinite(x))
    top_k: int = parameter(0, "keep the k likeliest tokens; 0 is off", "an integer >= 0 (0 is off)", lambda x: x >= 0)
    top_p: float = parameter(
        1.0, "keep the smallest likeliest set of this mass; 1 is off", "in (0, 1]", lambda x: (x > 0) & (x <= 1)
    )
    min_p: float = parameter(
        0.0, "keep tokens of at least this share of the likeliest's probability; 0 is off", "in [0, 1]",
        lambda x: (x >= 0) & (x <= 1),
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, "of tokens that were there before; 1 is off", "a finite number > 0", lambda x: (x > 0) & np.isfinite(x)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row draws its tokens. Names and meanings are those of `transformers`' generation options.

    All fields are arrays `[B]`, so that rows differ and changing them never recompiles.

    Attributes:
      temperature: float32; 0 is greedy, and skips everything but the repetition penalty.
      top_k: int32; keep the k likeliest (ties at the cut are all kept); 0 is off.
      top_p: float32 in (0, 1]; keep the smallest likeliest set of at least this mass; 1 is off.
      min_p: float32 in [0, 1]; keep what has at least this share of the likeliest token's probability; 0 is off.
      repetition_penalty: float32 > 0; divides the positive and multiplies the negative logits of seen tokens; 1 is off.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array

    @classmethod
    def make(cls, batch: int, temperature: Any = 0.0, **others: Any) -> "Sampling":
        """Checks and broadcasts scalars, or sequences of `batch` values; names and defaults are those of `SamplingOptions`.

        Raises:
          ValueError: naming the option that is out of range, and its range.
        """
        given = SamplingOptions(temperature=temperature, **others)
        columns = {field.name: column(field, getattr(given, field.name)) for field in dataclasses.fields(given)}
        return cls(**{name: jnp.asarray(np.broadcast_to(array, (batch,))) for name, array in columns.items()})


def column(field: dataclasses.Field, value: Any) -> np.ndarray:
    """A value of `SamplingOptions`, or a sequence of them, in the 32 bits that it is computed with.

    Raises:
      ValueError: where it is out of range.
    """
    dtype, said = np.int32 if field.type is int else np.float32, f"{field.name} must be {field.metadata['valid']}"
    try:
        array = np.asarray(value)
        if dtype is np.int32 and not np.array_equal(array, array.astype(np.int64)):
            raise ValueError("not a whole number")
        array = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{said}, got {value!r}") from error
    if not np.all(field.metadata["holds"](array)):
        raise ValueError(f"{said}, got {value!r}")
    return array
