"""The protocols of a decoder and of a way to decode, and two ways to run a decoder: a whole generation in one program,
and a stream of short calls.
"""

import abc
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

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
"""The state that a decoder carries from step to step."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a job needs from the program that decodes it.

    Attributes:
      greedy: whether no row uses a warper.
      brief: whether the job would be over before a program that only makes steps faster were compiled.
      form: which columns of sampling parameters its rows need.
    """

    greedy: bool = False
    brief: bool = False
    form: Form = USUAL


class Decoder(Protocol[State]):
    """The interface of every decoder: pure functions over a state whose leading fields are those of `Rows`. Hashable.

    `params` is `{"target": ...}` and whatever else the decoder names. None of these methods is jitted; the functions of
    this module are.

    A decoder extends this class and gets `init`, `insert` and the other defaults from it. Its methods are traced under
    this package's own settings (`specjax.settings`), whatever the caller's are.
    """

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        settle(cls, frozenset(("empty", "prefill", "read_prefix", "read_on", "step")))
        if "__repr__" not in vars(
            cls
        ):  # set on the class itself; otherwise the `dataclass` decorator would write one there
            cls.__repr__ = brief  # type: ignore[assignment]

    @property
    def needs(self) -> tuple[str, ...]:
        """The entries of `params` that must hold parameters."""
        return ("target",)

    @property
    def hosted(self) -> bool:
        """Whether the host calls several programs for a step, since they belong to several meshes.

        Then the functions of this module call the decoder's `hosted_empty`, `hosted_insert`, `hosted_step` and
        `hosted_run`.
        """
        return False

    @property
    def fills_in(self) -> bool:
        """Whether tokens after an open position may be known."""
        return False

    @property
    def reads_prefix(self) -> bool:
        """Whether the decoder has `read_prefix`, `read_on` and `prefix_axes`. If so, its `prefill` takes a `prefix`, and
        prefill does not use the row's key.
        """
        return False

    @property
    def obeys(self) -> bool:
        """Whether rows only write tokens that their warpers of logits leave possible, at every place."""
        return False

    @property
    def encodes(self) -> bool:
        """Whether prompts need a source, since an encoder of the target reads one (`specjax.lm.LM.encodes`)."""
        return False

    @property
    def num_texts(self) -> int:
        """The largest number of texts that a row ends with. If it is more than one, they are in the state's `found`."""
        return 1

    @property
    def slack(self) -> int:
        """Buffer slots needed beyond the longest text, because a step may write more than it keeps."""
        return 0

    def buffer(self, needed: int) -> int:
        """The buffer size for texts that need so many slots: one of a few sizes, because programs are compiled for
        each.

        If a step's cost grows with the buffer, the sizes are 128, 256, 512 and the multiples of 1024.
        """
        return next((size for size in (128, 256, 512) if size >= needed), -(-needed // 1024) * 1024)

    @property
    def costliest(self) -> Self:
        """A decoder of the same states whose step has only its most expensive program; a plan compiles this one."""
        return self

    def check_row(self, prompt: np.ndarray, limit: int) -> None:
        """Raises ValueError if this decoder cannot complete the prompt `[n]` up to this length, for a reason of its
        own.
        """
        return

    def fitted(self, needs: Needs) -> Self:
        """The decoder for such a job: same states and same text, but less to compile if less is needed."""
        return self

    def axes(self, state: State) -> State:
        """Logical axis names of every leaf of the state, as tuples. A leaf that leads with "batch" belongs to the rows."""
        ...

    def empty(self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1) -> State:
        """A state of finished rows, to be filled by `insert`.

        Args:
          params: the parameters.
          batch: B.
          capacity: L, at least the longest row's limit plus `slack`; rounded up to what the mesh splits the cache into.
          cache_dtype: the cache's type, unless the model sets one (`LlamaLM.cache_dtype`); None for the parameters'
            type.
          eos_width: K, the largest number of EOS ids of a row.
        """
        ...

    def prefill(self, params: PyTree, state: State, prompts: Prompts) -> State:
        """R new rows that hold these prompts and what is computed before their first step, for `insert`.

        A decoder with `reads_prefix` takes a `prefix` too.

        Args:
          params: the parameters.
          state: the state of B rows; the new rows have the same form.
          prompts: the R prompts.
        """
        ...

    def read_on(
        self, params: PyTree, state: State, prefix: Any, begin: jax.Array, end: jax.Array, width: int
    ) -> tuple[State, Any]:
        """Reads further tokens of a prompt, for a decoder that `reads_prefix`.

        Args:
          params: the parameters.
          state: the state of B rows, which stay as they are; the part that they share learns from the tokens.
          prefix: a row with the whole prompt in `tokens`, of which the first `begin` tokens were read. Its `length` is
            the buffer's, so that an insert with it reads nothing more, and one program serves every prompt.
          begin: `[]` int32.
          end: `[]` int32, the prompt's tokens. The last of them is not read, as in `prefill`.
          width: static, how many tokens are read together; those from `end` - 1 on are left out.

        Returns:
          The state, and the prefix with these tokens read.

        Raises:
          ValueError: if the decoder reads prompts as a whole.
        """
        raise ValueError(f"a {type(self).__name__} reads every prompt as a whole")

    def prefix_axes(self, prefix: Any) -> Any:
        """Logical axis names of every leaf of a prefix, for a decoder that `reads_prefix`.

        A leaf with an axis `slots` of the buffer's size, or of a multiple, holds an equal number of slots for every
        position, in their order. Those of a position depend on the tokens up to the one that follows it.

        Raises:
          ValueError: if the decoder reads prompts as a whole.
        """
        raise ValueError(f"a {type(self).__name__} reads every prompt as a whole")

    def step(self, params: PyTree, state: State) -> tuple[State, Any]:
        """One pass: the new state, and a record of what happened, which no later step needs."""
        ...

    @named
    @settled
    def init(self, params: PyTree, prompts: Prompts, *, capacity: int, cache_dtype: Any = None) -> State:
        """`empty` and `insert` in one, each under jit: a state whose rows are these prompts.

        Args:
          params: the parameters.
          prompts: the B prompts.
          capacity: see `empty`.
          cache_dtype: see `empty`.

        Raises:
          ValueError: if `params` lack an entry; outside jit, if a row does not fit. See `check_params` and `check_rows`.
        """
        batch = prompts.tokens.shape[0]
        check_params(self, params)
        check_rows(self, capacity, prompts)
        eos_width = 1 if prompts.eos is None else prompts.eos.shape[1]
        state = empty(self, params, batch, capacity, cache_dtype, eos_width, form=prompts.sampling.form)
        return _put_in(self, params, state, np.arange(batch, dtype=np.int32), prompts, None)

    @named
    @settled
    def insert(self, params: PyTree, state: Any, rows: jax.Array, prompts: Prompts, *, prefix: Any = None) -> Any:
        """Puts new prompts into rows and overwrites what these held.

        Args:
          params: the parameters.
          state: the state of B rows.
          rows: `[R]` int32, the rows to fill; an index of B or more drops its prompt (padding).
          prompts: the R prompts, with limits of at most L - `slack`.
          prefix: from `read_prefix`, if the decoder `reads_prefix`. Every prompt must begin with its tokens, or consist
            of them; only the rest is read.

        Raises:
          ValueError: outside jit, if a row does not fit, see `check_rows`; or for a prefix, if the decoder reads none.
        """
        batch, capacity = state.tokens.shape
        check_rows(self, capacity, prompts, rows, batch)
        if prefix is not None and not self.reads_prefix:
            raise ValueError(f"a {type(self).__name__} cannot share a prefix among prompts: leave the prefix out")
        mesh, axes = getattr(self, "mesh", None), self.axes(state)
        with under(mesh):
            fresh = self.prefill(params, state, prompts, **({} if prefix is None else {"prefix": prefix}))
            return constrain(mesh, axes, state.place(rows, fresh, axes))


class Decode(abc.ABC):
    """A way to decode: settings alone, without a model or arrays. Implementations are frozen dataclasses.

    `specjax.generate(decode=...)`, `specjax.Engine` and every command take one, or its line of text.
    """

    about: ClassVar[Named] = None
    """Its names in a line of text, and what its text guarantees."""

    def mode(self, model: Any) -> Any:
        """The model in the mode that this way decodes in, for a model of several kinds (`Model.dual`)."""
        return model

    @abc.abstractmethod
    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Any, PyTree]:
        """The decoder for a model, and its parameters.

        Args:
          model: from `specjax.load`.
          mesh: the mesh on which the parameters lie.
          rows: how many texts are decoded together, for settings that depend on it.
          logprobs: whether the log-probabilities of tokens are kept.

        Raises:
          ValueError: one line that says what this model cannot use, and what it can.
        """


def formed(decoder: Decoder[State], state: State, form: Form) -> State:
    """An empty state with the columns of a form."""
    if form == state.sampling.form:
        return state
    state = state.drawing(SamplingArrays.blank(state.length.shape[0], form))
    return constrain(getattr(decoder, "mesh", None), decoder.axes(state), state)


def on_host(*arrays: Any) -> bool:
    """Whether the host can read these arrays: they belong neither to a program that is being traced nor to other hosts."""
    return all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in arrays)


def check_params(decoder: Decoder, params: PyTree) -> None:
    """Raises ValueError if `params` lack an entry that the decoder `needs`, which would fail somewhere inside a trace."""
    given = params if isinstance(params, Mapping) else {}
    missing = [name for name in decoder.needs if not jax.tree.leaves(given.get(name))]
    if missing:
        entries = ", ".join(f'"{name}": ...' for name in decoder.needs)
        raise ValueError(
            f"a {type(decoder).__name__} takes params {{{entries}}} with the parameters of each; it got none for "
            f"{', '.join(missing)}"
        )


def check_rows(decoder: Decoder, capacity: int, prompts: Prompts, rows: Any = None, batch: int = 0) -> None:
    """Checks shapes and key types, and on the host each row; under jit, limits are cut to the capacity instead.

    Args:
      decoder: the decoder that will hold the rows.
      capacity: L.
      prompts: the prompts to insert.
      rows: see `Decoder.insert`; prompts for rows at `batch` and above are padding and are not checked. None: all are
        checked.
      batch: B.

    Raises:
      ValueError: for a wrong shape or type, or if rows do not fit; it names the first such row and what that needs.
    """
    prompts.check()
    _check_sources(decoder, capacity, prompts)
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


def _check_sources(decoder, capacity, prompts):
    """Raises ValueError if prompts have a source that nothing reads, lack one, or have one that does not fit."""
    source = prompts.source
    if source is None and not decoder.encodes:
        return
    if source is None:
        raise ValueError("the target has an encoder, and the prompts have no source for it: give Prompts a source")
    if not decoder.encodes:
        raise ValueError("the prompts have a source, and the target has no encoder to read it: leave the source out")
    most = capacity if source.is_tokens else source.inputs.shape[1]
    if source.is_tokens and source.inputs.shape[1] > capacity:
        raise ValueError(
            f"the source has room for {source.inputs.shape[1]} tokens, which a capacity of {capacity} does not hold: give at "
            "least that"
        )
    if not on_host(source.lengths):
        return
    lengths = np.asarray(jax.device_get(source.lengths))
    for row in np.flatnonzero((lengths < 1) | (lengths > min(most, source.inputs.shape[1]))):
        raise ValueError(f"the source of prompt {row} is said to have {lengths[row]} tokens: give 1 to {most}")


NO_LIMIT = 2**31 - 1


@named
@settled
def run(
    decoder: Decoder[State], params: PyTree, state: State, max_steps: jax.Array | int = NO_LIMIT,
    min_live: jax.Array | int = 1,
) -> State:  # fmt: skip
    """Makes steps until fewer than `min_live` rows are running, or `max_steps` times, in one `lax.while_loop`. `state`
    is donated.

    There is one program per decoder and state shape, whatever the two numbers. `run_program` is that program, to lower
    or to compile.
    """
    if decoder.hosted:
        return cast(Any, decoder).hosted_run(params, state, max_steps, min_live)
    return run_program(decoder, params, state, _count(max_steps), _count(min_live))


def step(decoder: Decoder[State], params: PyTree, state: State) -> tuple[State, Any]:
    """`decoder.step` under jit, with the state donated. Returns the new state, of the same type, and a record of the
    step.

    `step_program` is the jitted function. `jax.jit(decoder.step)` works as well, but a type checker knows nothing of
    its result: JAX 0.10 does not say what a jitted function returns.
    """
    if decoder.hosted:
        return cast(Any, decoder).hosted_step(params, state)
    return step_program(decoder, params, state)


step_program = jax.jit(
    lambda decoder, params, state: decoder.step(params, state), static_argnums=(0,), donate_argnums=(2,)
)
"""`step` as a jitted function."""


def _count(number: jax.Array | int) -> Any:
    """The number as int32; for a number on the host, `jnp.asarray` would compile a program."""
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
      ValueError: if a row does not fit; see `check_rows`.
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
    """`insert_program` for arrays that may be on the host: they are sent first, which `jax_transfer_guard` allows."""
    if decoder.hosted:
        return cast(Any, decoder).hosted_insert(params, state, rows, prompts, prefix)
    return insert_program(decoder, params, state, *jax.device_put((rows, prompts)), prefix)


def _named(form: Form) -> str:
    return ", ".join(name + (f" {widths}" if widths else "") for name, widths in form)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def insert_program(
    decoder: Decoder[State], params: PyTree, state: State, rows: Any, prompts: Prompts, prefix: Any = None
):
    """`insert` without its check of the rows."""
    return decoder.insert(params, state, rows, prompts, prefix=prefix)


read_prefix = jax.jit(
    lambda decoder, params, state, tokens: decoder.read_prefix(params, state, tokens),
    static_argnums=(0,),
    donate_argnums=(2,),
)
"""`decoder.read_prefix` under jit, with the state donated, for decoders that read a prefix once for many prompts."""


@functools.partial(jax.jit, static_argnums=0)
@settled
def row_of(decoder: Decoder[State], state: State, row: jax.Array) -> State:
    """One row of a state, for `copy_row`; leaves that the rows share become scalars."""
    own = lambda leaf, axes: leaf[row][None] if axes[:1] == ("batch",) else jnp.zeros((), leaf.dtype)
    return jax.tree.map(own, state, decoder.axes(state))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
@settled
def copy_row(decoder: Decoder[State], state: State, row: jax.Array, kept: State, key: jax.Array) -> State:
    """The state with another completion of a prompt that was read before. For decoders with `reads_prefix`; the state
    is donated.

    Args:
      decoder: the decoder of these rows.
      state: the state of B rows.
      row: `[]` int32, the row to fill.
      kept: from `row_of`, for the row into which the prompt was inserted, before any step.
      key: `[]` typed key.
    """
    axes = decoder.axes(state)
    new = jax.tree.map(lambda old, own, names: own if names[:1] == ("batch",) else old, state, kept, axes)
    placed = state.place(row[None], dataclasses.replace(new, key=key[None]), axes)
    return constrain(getattr(decoder, "mesh", None), axes, placed)


def empty(
    decoder: Decoder[State], params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1,
    form: Form = USUAL,
) -> State:  # fmt: skip
    """`decoder.empty` under jit, with the columns of a form."""
    if decoder.hosted:
        return cast(Any, decoder).hosted_empty(params, batch, capacity, cache_dtype, eos_width, form)
    return _empty_program(decoder, params, batch, capacity, cache_dtype, eos_width, form=form)


_empty_program = jax.jit(
    settled(
        lambda decoder, params, batch, capacity, cache_dtype, eos_width, form=USUAL: formed(
            decoder, decoder.empty(params, batch, capacity, cache_dtype, eos_width), form
        )
    ),
    static_argnums=(0, 2, 3, 4, 5, 6),
    static_argnames=("form",),
)


@dataclasses.dataclass(frozen=True)
class Progress(Generic[State]):
    """The result of one call of a stream.

    Attributes:
      state: the decoder's state; the next call consumes it.
      tokens: one list of new ids per row.
      finish: a `Finish` value per row.
    """

    state: State
    tokens: list[list[int]]
    finish: list[Finish]


@named
def stream(
    decoder: Decoder[State], params: PyTree, state: State, steps_per_call: int = 4
) -> Generator[Progress[State], State | None]:
    """Yields the rows' new tokens every few steps until all rows are done.

    The state is donated to each call: take what you need from `Progress.state` before you ask for the next. A state
    that is sent into the generator replaces it, to stop rows or to insert prompts.
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
