"""Running any decoder: the protocol, a whole generation in one program, and a stream of short calls."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.state import DecodeState, Finish

PyTree = Any


class Decoder(Protocol):
    """A pure step over a state whose leading fields are those of `DecodeState`. Hashable."""

    @property
    def slack(self) -> int: ...

    def empty(self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1) -> Any: ...

    @property
    def insert(self) -> Any: ...

    def step(self, params: PyTree, state: Any) -> tuple[Any, Any]: ...


NO_LIMIT = 2**31 - 1


def run(
    decoder: Decoder, params: PyTree, state: Any, max_steps: jax.Array | int = NO_LIMIT, min_live: jax.Array | int = 1
) -> Any:
    """Steps until fewer than `min_live` rows are running, or `max_steps` times, in one `lax.while_loop`. `state` is donated.

    One program a decoder and state shape, whatever the two numbers; `run_program` is that program, to lower or to compile.
    """
    return run_program(decoder, params, state, jnp.asarray(max_steps, jnp.int32), jnp.asarray(min_live, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def run_program(
    decoder: Decoder, params: PyTree, state: Any, max_steps: jax.Array, min_live: jax.Array | int = 1
) -> Any:
    """`run` as a jitted function of arrays."""
    least = jnp.maximum(min_live, 1)

    def more(carry):
        count, state = carry
        return (count < max_steps) & (jnp.sum(~state.done) >= least)

    def body(carry):
        count, state = carry
        return count + 1, decoder.step(params, state)[0]

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


insert = jax.jit(
    lambda decoder, params, state, *args, width, **kwargs: decoder.insert(params, state, *args, width=width, **kwargs),
    static_argnums=(0,),
    static_argnames=("width",),
    donate_argnums=(2,),
)
"""`decoder.insert` under jit, with the state donated."""

read_prefix = jax.jit(
    lambda decoder, params, state, tokens: decoder.read_prefix(params, state, tokens),
    static_argnums=(0,),
    donate_argnums=(2,),
)
"""`decoder.read_prefix` under jit, with the state donated: of decoders that can read a prefix once for many prompts."""

empty = jax.jit(
    lambda decoder, params, batch, capacity, cache_dtype, eos_width: decoder.empty(
        params, batch, capacity, cache_dtype, eos_width
    ),
    static_argnums=(0, 2, 3, 4, 5),
)
"""`decoder.empty` under jit."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one call of a stream brought.

    Attributes:
      state: the decoder's state; the next call consumes it.
      tokens: one list of new ids a row.
      finish: a `Finish` value a row.
    """

    state: Any
    tokens: list[list[int]]
    finish: list[Finish]


def stream(decoder: Decoder, params: PyTree, state: DecodeState, steps_per_call: int = 4) -> Iterator[Progress]:
    """Yields the rows' new tokens every few steps, until all rows are done.

    The state is donated to each call: take what you need from `Progress.state` before asking for the next. A state sent
    into the generator replaces it (to stop rows, or to insert prompts).
    """
    seen = np.asarray(state.prompt_length)
    while True:
        state = run(decoder, params, state, steps_per_call)
        tokens, length, finish = jax.device_get((state.tokens, state.length, state.finish))
        seen = np.minimum(seen, length)
        news = [tokens[i, seen[i] : length[i]].tolist() for i in range(len(length))]
        seen = length
        sent = yield Progress(state, news, [Finish(f) for f in finish.tolist()])
        if sent is not None:
            state = sent
            fresh = np.asarray(state.length)
            seen = np.where(fresh == seen, seen, np.asarray(state.prompt_length))
        if bool(np.all(np.asarray(state.finish) != Finish.RUNNING)):
            return
