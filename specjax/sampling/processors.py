"""The user's own warpers: functions of one text and the logits of its next token, applied wherever a token is drawn
from these.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from specjax.warpers import Text

Array = jax.Array
Processor = Callable[[Array, Array, Array], Array]
"""A function from one text and the raw logits `[V]` float32 of its next token to other logits `[V]`; -inf bans a token.

The text is `tokens` `[L]` int32, of which the first `length` `[]` count. The rest is garbage, and L may vary. JAX
traces the function and maps it over the rows and the nodes of a draft tree. A node's text is the row's own text
followed by the path to the node, and a processor may depend on nothing more. So its result is the same whatever was
drafted, and a seed keeps its text.

It must be hashable, and the same object in every call: a function of a module rather than a new lambda, or programs
compile again.
"""


def checked(processors: Iterable[Processor], vocab_size: int) -> tuple[Processor, ...]:
    """The processors as a tuple.

    Raises:
      ValueError: for a processor that cannot be called or hashed, or that does not return logits.
    """
    processors = tuple(processors)
    row = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    text, count = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    for one in processors:
        if not callable(one) or type(one).__hash__ is None:
            raise ValueError(
                f"a logits processor is a hashable function (tokens, length, logits) -> logits, not {one!r}"
            )
        got = jax.eval_shape(one, text, count, row)
        if getattr(got, "shape", None) != row.shape or got.dtype != row.dtype:
            raise ValueError(
                f"the logits processor {getattr(one, '__name__', one)!r} gets float32 logits of {vocab_size} tokens and must "
                f"return such, not {got}"
            )
    return processors


def process(processors: Sequence[Processor], logits: Array, text: Text) -> Array:
    """Logits `[B, T, V]` after the processors, in order.

    Args:
      processors: see `Processor`.
      logits: `[B, T, V]` float32.
      text: the text before each of T positions.
    """
    every = lambda tokens, length, logits: functools.reduce(lambda x, one: one(tokens, length, x), processors, logits)
    return text.each(every, logits)
