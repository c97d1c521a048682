"""What a decoder and a way to decode are, and running any decoder: the protocol, a whole generation in one program, and a
stream of short calls."""

import abc
import dataclasses
import functools
from collections.abc import Generator
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import Named
from specjax.names import named
from specjax.pretty import brief
from specjax.prompts import OPEN, Prompts, check_padding
from specjax.sampling_params import USUAL, Form, SamplingArrays
from specjax.settings import settle, settled
from specjax.sharding.ambient import under
from specjax.sharding.rules import constrain
from specjax.state import Finish, Rows

PyTree = Any
State = TypeVar("State", bound=Rows)
"""What a decoder carries from step to step."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a job asks of the program that decodes it.

    Attributes:
      greedy: whether no row uses a warper.
      brief: whether it is over before a program that only makes steps faster would have been compiled.
      form: which columns of sampling parameters its rows need.
    """

    greedy: bool = False
    brief: bool = False
    form: Form = USUAL


class Decoder(Protocol[State]):
    """What every decoder is: pure functions over a state whose leading fields are those of `Rows`. Hashable.

    `params` is `{"target": ...}` and what else the decoder names. None of these functions is jitted; those of this module are.
    A decoder extends this class, which gives it `init`, `insert` and the defaults of the rest, and whose methods are traced
    under settings of their own (`specjax.settings`), whatever those of the caller are.
    """

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        settle(cls, frozenset(("empty", "prefill", "read_prefix", "step")))
        if "__repr__" not in vars(cls):  # in the class itself, or the decorator `dataclass` would write one there
            cls.__repr__ = brief  # type: ignore[assignment]

    @property
    def fills_in(self) -> bool:
        """Whether tokens may be known after open positions."""
        return False

    @property
    def reads_prefix(self) -> bool:
        """Whether it has `read_prefix`, its `prefill` takes a `prefix`, and reading a prompt has no use for the row's key."""
        return False

    @property
    def num_texts(self) -> int:
        """How many texts of its prompt a row ends with, at most. Where these are several, its state has them in `found`."""
        return 1

    @property
    def slack(self) -> int:
        """Buffer slots needed beyond the longest text: what a step may write before it cuts."""
        return 0

    def buffer(self, needed: int) -> int:
        """Buffer slots for texts that need so many: one of few sizes, since programs are compiled for each.

        Where a step costs what its texts are long, those are 128, 256, 512 and the multiples of 1024.
        """
        return next((size for size in (128, 256, 512) if size >= needed), -(-needed // 1024) * 1024)

    @property
    def costliest(self) -> Self:
        """A decoder of the same states whose step has only the dearest of its programs: what a plan compiles."""
        return self

    def check_row(self, prompt: np.ndarray, limit: int) -> None:
        """Raises ValueError where it cannot complete a prompt `[n]` up to this length, for a reason that is its own."""
        return

    def fitted(self, needs: Needs) -> Self:
        """The decoder for such a job: the same states and the same text, with less to compile where less is asked for."""
        return self

    def axes(self, state: State) -> State:
        """Logical axis names of every leaf of the state, as tuples; one that leads with "batch" is the row's own."""
        ...

    def empty(self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1) -> State:
        """A state of finished rows, to be filled by `insert`.

        Args:
          params: the parameters.
          batch: B.
          capacity: L, at least the longest row's limit plus `slack`; rounded up to what the mesh splits the cache into.
          cache_dtype: of the cache, where the model does not say (`LlamaLM.cache_dtype`); None: that of the parameters.
          eos_width: K, how many EOS ids a row may have.
        """
        ...

    def prefill(self, params: PyTree, state: State, prompts: Prompts) -> State:
        """R rows of their own that hold these prompts, and what is computed of them before their first step: for `insert`.

        One that `reads_prefix` takes a `prefix` besides.

        Args:
          params: the parameters.
          state: of B rows, which are like those to make.
          prompts: of R rows.
        """
        ...

    def step(self, params: PyTree, state: State) -> tuple[State, Any]:
        """One pass: the new state, and what happened, which nothing needs."""
        ...

    @named
    @settled
    def init(self, params: PyTree, prompts: Prompts, *, capacity: int, cache_dtype: Any = None) -> State:
        """`empty` and `insert` in one, each under jit: a state whose rows are these prompts.

        Args:
          params: the parameters.
          prompts: of B rows.
          capacity: see `empty`.
          cache_dtype: likewise.

        Raises:
          ValueError: outside jit, where a row does not fit, see `check_rows`.
        """
        batch = prompts.tokens.shape[0]
        check_rows(self, capacity, prompts)
        eos_width = 1 if prompts.eos is None else prompts.eos.shape[1]
        state = empty(self, params, batch, capacity, cache_dtype, eos_width, form=prompts.sampling.form)
        return _put_in(self, params, state, np.arange(batch, dtype=np.int32), prompts, None)

    @named
    @settled
    def insert(self, params: PyTree, state: Any, rows: jax.Array, prompts: Prompts, *, prefix: Any = None) -> Any:
        """Puts new prompts into rows, whatever those held.

        Args:
          params: the parameters.
          state: of B rows.
          rows: `[R]` int32, where they go; B or more drops one (padding).
          prompts: of R rows, with limits of at most L - `slack`.
          prefix: from `read_prefix`, of a decoder that `reads_prefix`: every prompt begins with its tokens, or is just them;
            only the rest is read.

        Raises:
          ValueError: outside jit, where a row does not fit, see `check_rows`; on a prefix where none is read.
        """
        batch, capacity = state.tokens.shape
        check_rows(self, capacity, prompts, rows, batch)
        if prefix is not None and not self.reads_prefix:
            raise ValueError(f"a {type(self).__name__} reads no prefix for many prompts: leave it out")
        mesh, axes = getattr(self, "mesh", None), self.axes(state)
        with under(mesh):
            fresh = self.prefill(params, state, prompts, **({} if prefix is None else {"prefix": prefix}))
            return constrain(mesh, axes, state.place(rows, fresh, axes))


class Decode(abc.ABC):
    """A way to decode: settings alone, without a model or arrays. Implementations are frozen dataclasses.

    `specjax.generate(decode=...)`, `specjax.Engine` and every command take one, or its line of text.
    """

    about: ClassVar[Named] = None
    """Its names in a line of text, and what its text is worth."""

    @abc.abstractmethod
    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Any, PyTree]:
        """The decoder of a model, and its parameters.

        Args:
          model: what `specjax.load` returned.
          mesh: where parameters lie.
          rows: how many texts are decoded together, where something that is left open follows from that.
          logprobs: whether the log-probabilities of tokens are kept.

        Raises:
          ValueError: one line that says what cannot be used with this model, and what can.
        """


def formed(decoder: Decoder[State], state: State, form: Form) -> State:
    """An empty state with the columns of a form."""
    if form == state.sampling.form:
        return state
    state = dataclasses.replace(state, sampling=SamplingArrays.blank(state.length.shape[0], form))
    return constrain(getattr(decoder, "mesh", None), decoder.axes(state), state)


def on_host(*arrays: Any) -> bool:
    """Whether the host can look at these arrays: they are not of a program that is being traced, nor of other hosts."""
    return all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in arrays)


def check_rows(decoder: Decoder, capacity: int, prompts: Prompts, rows: Any = None, batch: int = 0) -> None:
    """Checks shapes and the kind of keys, and on the host rows one by one; under jit limits are cut to the capacity instead.

    Args:
      decoder: that is to hold them.
      capacity: L.
      prompts: that are to enter.
      rows: see `Decoder.insert`; those of `batch` and more are padding, and not looked at. None: all count.
      batch: B.

    Raises:
      ValueError: on another shape or kind, and where rows do not fit: naming the first of them, and what it needs.
    """
    prompts.check()
    if not on_host(prompts.lengths, prompts.limit, rows):
        return
    lengths, limit, rows = jax.device_get((prompts.lengths, prompts.limit, rows))
    lengths, limit = np.asarray(lengths), np.asarray(limit)
    counts = np.ones(lengths.shape, bool) if rows is None else np.asarray(rows) < batch
    least, size = lengths if decoder.fills_in else lengths + 1, prompts.tokens.shape[1]
    for row in np.flatnonzero(counts & ((lengths < 1) | (lengths > size))):
        raise ValueError(f"prompt {row} is said to have {lengths[row]} tokens: give 1 to {size}")
    for row in np.flatnonzero(counts & (limit < least)):
        raise ValueError(
            f"prompt {row} has {lengths[row]} tokens: its limit must be at least {least[row]}, got {limit[row]}"
        )
    for row in np.flatnonzero(counts & (limit > capacity - decoder.slack)):
        needed = int(np.max(limit[counts])) + decoder.slack
        raise ValueError(
            f"prompt {row} has a limit of {limit[row]} tokens, and this decoder writes up to {decoder.slack} beyond it: that "
            f"does not fit a capacity of {capacity}, give at least {needed}"
        )
    if not on_host(prompts.tokens):
        return
    tokens = np.asarray(jax.device_get(prompts.tokens))
    check_padding(tokens, lengths, np.flatnonzero(counts & (lengths < size)))
    for row in np.flatnonzero(counts):
        given = tokens[row, : lengths[row]]
        if not decoder.fills_in and (given == OPEN).any():
            raise ValueError(f"prompt {row} holds {OPEN}, an open position, and this decoder writes from left to right")
        decoder.check_row(given, int(limit[row]))


NO_LIMIT = 2**31 - 1


@named
@settled
def run(
    decoder: Decoder[State], params: PyTree, state: State, max_steps: jax.Array | int = NO_LIMIT,
    min_live: jax.Array | int = 1,
) -> State:  # fmt: skip
    """Steps until fewer than `min_live` rows are running, or `max_steps` times, in one `lax.while_loop`. `state` is donated.

    One program per decoder and state shape, whatever the two numbers; `run_program` is that program, to lower or to
    compile.
    """
    return run_program(decoder, params, state, _count(max_steps), _count(min_live))


def step(decoder: Decoder[State], params: PyTree, state: State) -> tuple[State, Any]:
    """`decoder.step` under jit, with the state donated: the new state, of the type that went in, and what happened.

    `step_program` is the jitted function. `jax.jit(decoder.step)` is as good a program, of which checkers of types know
    nothing: JAX 0.10 does not say what a jitted function returns.
    """
    return step_program(decoder, params, state)


step_program = jax.jit(
    lambda decoder, params, state: decoder.step(params, state), static_argnums=(0,), donate_argnums=(2,)
)
"""`step` as a jitted function."""


def _count(number: jax.Array | int) -> Any:
    """As int32; of a number on the host `jnp.asarray` would compile a program."""
    return jnp.asarray(number, jnp.int32) if isinstance(number, jax.Array) else jax.device_put(np.int32(number))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
@settled
def run_program(
    decoder: Decoder[State], params: PyTree, state: State, max_steps: jax.Array, min_live: jax.Array | int = 1
) -> State:
    """`run` as a jitted function of arrays."""
    least = jnp.maximum(min_live, 1)

    def more(carry):
        count, state = carry
        return (count < max_steps) & (jnp.sum(~state.done) >= least)

    def body(carry):
        count, state = carry
        return count + 1, decoder.step(params, state)[0]

    return jax.lax.while_loop(more, body, (jnp.int32(0), state))[1]


@named
@settled
def insert(
    decoder: Decoder[State], params: PyTree, state: State, rows: Any, prompts: Prompts, *, prefix: Any = None
) -> State:
    """`decoder.insert` under jit, with the state donated; `insert_program` is the jitted function.

    Raises:
      ValueError: where a row does not fit, see `check_rows`.
    """
    batch, capacity = state.tokens.shape
    check_rows(decoder, capacity, prompts, rows, batch)
    if prompts.sampling.form != state.sampling.form:
        raise ValueError(
            f"rows with the sampling parameters {_named(prompts.sampling.form)} do not fit a state with "
            f"{_named(state.sampling.form)}: make it with specjax.decoder.empty(..., form=prompts.sampling.form)"
        )
    return _put_in(decoder, params, state, rows, prompts, prefix)


def _put_in(decoder, params, state, rows, prompts, prefix):
    """`insert_program` of what a host has too: it is sent before, which `jax_transfer_guard` allows."""
    return insert_program(decoder, params, state, *jax.device_put((rows, prompts)), prefix)


def _named(form: Form) -> str:
    return ", ".join(name + (f" {widths}" if widths else "") for name, widths in form)


insert_program = jax.jit(
    lambda decoder, params, state, rows, prompts, prefix=None: decoder.insert(
        params, state, rows, prompts, prefix=prefix
    ),
    static_argnums=(0,),
    donate_argnums=(2,),
)
"""`insert` without its check of the rows."""

read_prefix = jax.jit(
    lambda decoder, params, state, tokens: decoder.read_prefix(params, state, tokens),
    static_argnums=(0,),
    donate_argnums=(2,),
)
"""`decoder.read_prefix` under jit, with the state donated: of decoders that can read a prefix once for many prompts."""


@functools.partial(jax.jit, static_argnums=0)
@settled
def row_of(decoder: Decoder[State], state: State, row: jax.Array) -> State:
    """One row of a state, for `copy_row`; scalars in place of what rows share."""
    own = lambda leaf, axes: leaf[row][None] if axes[:1] == ("batch",) else jnp.zeros((), leaf.dtype)
    return jax.tree.map(own, state, decoder.axes(state))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
@settled
def copy_row(decoder: Decoder[State], state: State, row: jax.Array, kept: State, key: jax.Array) -> State:
    """The state, which is donated, with another completion of a prompt that was read before: of decoders that `reads_prefix`.

    Args:
      decoder: that holds the rows.
      state: of B rows.
      row: `[]` int32, where it goes.
      kept: from `row_of`, of the row that the prompt was inserted into, before any step.
      key: `[]` typed key.
    """
    axes = decoder.axes(state)
    new = jax.tree.map(lambda old, own, names: own if names[:1] == ("batch",) else old, state, kept, axes)
    placed = state.place(row[None], dataclasses.replace(new, key=key[None]), axes)
    return constrain(getattr(decoder, "mesh", None), axes, placed)


empty = jax.jit(
    settled(
        lambda decoder, params, batch, capacity, cache_dtype, eos_width, form=USUAL: formed(
            decoder, decoder.empty(params, batch, capacity, cache_dtype, eos_width), form
        )
    ),
    static_argnums=(0, 2, 3, 4, 5, 6),
    static_argnames=("form",),
)
"""`decoder.empty` under jit, with the columns of a form."""


@dataclasses.dataclass(frozen=True)
class Progress(Generic[State]):
    """What one call of a stream brought.

    Attributes:
      state: the decoder's state; the next call consumes it.
      tokens: one list of new ids a row.
      finish: a `Finish` value per row.
    """

    state: State
    tokens: list[list[int]]
    finish: list[Finish]


@named
def stream(
    decoder: Decoder[State], params: PyTree, state: State, steps_per_call: int = 4
) -> Generator[Progress[State], State | None]:
    """Yields the rows' new tokens every few steps, until all rows are done.

    The state is donated to each call: take what you need from `Progress.state` before asking for the next. A state sent
    into the generator replaces it (to stop rows, or to insert prompts).
    """
    seen = jax.device_get(state.prompt_length)
    while True:
        state = run(decoder, params, state, steps_per_call)
        tokens, length, finish = jax.device_get((state.tokens, state.length, state.finish))
        seen = np.minimum(seen, length)
        news = [tokens[i, seen[i] : length[i]].tolist() for i in range(len(length))]
        seen = length
        sent = yield Progress(state, news, [Finish(f) for f in finish.tolist()])
        if sent is not None:
            state = sent
            fresh, begins = jax.device_get((state.length, state.prompt_length))
            seen = np.where(fresh == seen, seen, begins)
        if bool(np.all(jax.device_get(state.finish) != Finish.RUNNING)):
            return
