"""Sampling parameters: one traced array a name, one entry a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


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
    def make(cls, batch: int, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0) -> "Sampling":
        """Checks and broadcasts scalars, or sequences of `batch` values.

        Raises:
          ValueError: naming the option that is out of range, and its range.
        """
        values = {
            "temperature": (temperature, np.float32, lambda x: (x >= 0) & np.isfinite(x), "a finite number >= 0"),
            "top_k": (top_k, np.int32, lambda x: x >= 0, "an integer >= 0 (0 is off)"),
            "top_p": (top_p, np.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
            "min_p": (min_p, np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
            "repetition_penalty": (
                repetition_penalty,
                np.float32,
                lambda x: (x > 0) & np.isfinite(x),
                "a finite number > 0",
            ),
        }
        fields = {}
        for name, (value, dtype, good, text) in values.items():
            try:
                array = np.asarray(value)
                if dtype is np.int32 and not np.array_equal(array, array.astype(np.int64)):
                    raise ValueError("not a whole number")
                array = array.astype(dtype)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} must be {text}, got {value!r}") from error
            if not np.all(good(array)):
                raise ValueError(f"{name} must be {text}, got {value!r}")
            fields[name] = jnp.asarray(np.broadcast_to(array, (batch,)))
        return cls(**fields)
