"""What a decoder is, and running any: the protocol, a whole generation in one program, and a stream of short calls."""

import dataclasses
import functools
import inspect
from collections.abc import Generator
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.names import check_keywords, named
from specjax.pretty import brief
from specjax.sampling import SamplingArrays
from specjax.sampling_params import USUAL, Form
from specjax.settings import settle, settled
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
    A decoder extends this class, which gives it `init` and the defaults of the rest, and whose methods are traced under
    settings of their own (`specjax.settings`), whatever those of the caller are.
    """

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        settle(cls, frozenset(("empty", "insert", "read_prefix", "step")))
        if "__repr__" not in vars(cls):  # in the class itself, or the decorator `dataclass` would write one there
            cls.__repr__ = brief  # type: ignore[assignment]

    @property
    def fills_in(self) -> bool:
        """Whether tokens may be known behind open positions."""
        return False

    @property
    def reads_prefix(self) -> bool:
        """Whether it has `read_prefix`, its `insert` takes a `prefix`, and reading a prompt has no use for the row's key."""
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

    def insert(
        self, params: PyTree, state: State, rows: jax.Array, prompts: jax.Array, lengths: jax.Array, row_keys: jax.Array, *,
        limit: jax.Array, sampling: SamplingArrays, eos: jax.Array | None = None, width: int | None = None,
    ) -> State:  # fmt: skip
        """Puts new prompts into rows, whatever those held.

        Args:
          params: the parameters.
          state: of B rows.
          rows: `[R]` int32, where they go; B or more drops one (padding).
          prompts: `[R, P]` int32, right-padded.
          lengths: `[R]` int32, at least 1.
          row_keys: `[R]` typed keys (`specjax.sampling.row_keys`, or `jax.random.split`): one a row, whose noise is its own.
          limit: `[R]` int32, the text length at which a row stops, at most L - `slack`.
          sampling: of R rows.
          eos: `[R, K]` int32, -1 padded, or None.
          width: tokens of the prompt that are read together.

        Raises:
          ValueError: outside jit, where a row does not fit, see `check_rows`.
        """
        ...

    def step(self, params: PyTree, state: State) -> tuple[State, Any]:
        """One pass: the new state, and what happened, which nothing needs."""
        ...

    @named
    @settled
    def init(
        self, params: PyTree, prompts: jax.Array, lengths: jax.Array, row_keys: jax.Array, *, limit: jax.Array,
        sampling: SamplingArrays, capacity: int, eos: jax.Array | None = None, cache_dtype: Any = None,
    ) -> State:  # fmt: skip
        """`empty` and `insert` in one, each under jit: a state whose rows are these prompts.

        Raises:
          ValueError: outside jit, where a row does not fit, see `check_rows`.
        """
        batch = prompts.shape[0]
        check_rows(self, capacity, prompts, lengths, row_keys, limit, sampling, eos)
        eos_width = 1 if eos is None else eos.shape[1]
        state = empty(self, params, batch, capacity, cache_dtype, eos_width, form=sampling.form)
        rows = np.arange(batch, dtype=np.int32)
        return _put_in(
            self, params, state, rows, prompts, lengths, row_keys, limit=limit, sampling=sampling, eos=eos, width=None
        )


def formed(decoder: Decoder[State], state: State, form: Form) -> State:
    """An empty state with the columns of a form."""
    if form == state.sampling.form:
        return state
    state = dataclasses.replace(state, sampling=SamplingArrays.blank(state.length.shape[0], form))
    return constrain(getattr(decoder, "mesh", None), decoder.axes(state), state)


def on_host(*arrays: Any) -> bool:
    """Whether the host can look at these arrays: they are not of a program that is being traced, nor of other hosts."""
    return all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in arrays)


def check_rows(
    decoder: Decoder, capacity: int, prompts: Any, lengths: Any, row_keys: Any, limit: Any, sampling: SamplingArrays,
    eos: Any = None, rows: Any = None, batch: int = 0,
) -> None:  # fmt: skip
    """Checks shapes and the kind of keys, and on the host rows one by one; under jit limits are cut to the capacity instead.

    Args:
      decoder: that is to hold them.
      capacity: L.
      prompts: see `Decoder.insert`.
      lengths: likewise.
      row_keys: likewise.
      limit: likewise.
      sampling: likewise.
      eos: likewise.
      rows: likewise; those of `batch` and more are padding, and not looked at. None: all count.
      batch: B.

    Raises:
      ValueError: on another shape or kind, and where rows do not fit: naming the first of them, and what it needs.
    """
    _check_shapes(prompts, lengths, row_keys, limit, sampling, eos)
    if not on_host(lengths, limit, rows):
        return
    lengths, limit, rows = jax.device_get((lengths, limit, rows))
    lengths, limit = np.asarray(lengths), np.broadcast_to(limit, np.shape(lengths))
    counts = np.ones(lengths.shape, bool) if rows is None else np.asarray(rows) < batch
    least = lengths if decoder.fills_in else lengths + 1
    for row in np.flatnonzero(counts & ((lengths < 1) | (lengths > prompts.shape[1]))):
        raise ValueError(f"prompt {row} is said to have {lengths[row]} tokens: give 1 to {prompts.shape[1]}")
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
    if not on_host(prompts):
        return
    prompts = np.asarray(jax.device_get(prompts))
    _check_padding(prompts, lengths, np.flatnonzero(counts & (lengths < prompts.shape[1])))
    for row in np.flatnonzero(counts):
        decoder.check_row(prompts[row, : lengths[row]], int(limit[row]))


def _check_shapes(prompts, lengths, row_keys, limit, sampling, eos):
    """That arrays are of the prompts' rows; a single key would be broadcast, and all rows have the same noise."""
    if np.ndim(prompts) != 2:
        raise ValueError(f"prompts are of shape {np.shape(prompts)}: give [R, P], a row each")
    count = len(prompts)
    if not jnp.issubdtype(getattr(row_keys, "dtype", np.dtype(int)), jax.dtypes.prng_key):
        raise ValueError(
            "row_keys are not typed keys: make them with specjax.sampling.row_keys(seed, ids) or "
            "jax.random.split(jax.random.key(seed), rows); old ones of jax.random.PRNGKey go through jax.random.wrap_key_data"
        )
    if str(jax.random.key_impl(row_keys)) != "threefry2x32":
        raise ValueError(
            f"row_keys are {jax.random.key_impl(row_keys)} keys: jax.random.key(seed, impl='threefry2x32') makes one that fits"
        )
    if row_keys.shape != (count,):
        raise ValueError(
            f"row_keys are of shape {row_keys.shape}, and there are {count} prompts: give a key a row, since each has noise "
            f"of its own: specjax.sampling.row_keys(seed, ids), or jax.random.split(key, {count})"
        )
    if np.shape(lengths) != (count,):
        raise ValueError(f"lengths are of shape {np.shape(lengths)}: give one a prompt, [{count}]")
    if np.shape(limit) not in ((), (1,), (count,)):
        raise ValueError(f"limit is of shape {np.shape(limit)}: give one a prompt, [{count}]")
    if len(sampling.temperature) not in (1, count):
        raise ValueError(
            f"sampling is of {len(sampling.temperature)} rows: specjax.sampling.SamplingArrays.make({count}) fits"
        )
    if eos is not None and (np.ndim(eos) != 2 or len(eos) not in (1, count)):
        raise ValueError(
            f"eos is of shape {np.shape(eos)}: give [{count}, K], the ids of each row, -1 where it has fewer"
        )


def _check_padding(prompts, lengths, short):
    """That prompts are not padded on the left: shorter ones all begin with so many times one id, and do not end with one."""
    if not short.size:
        return
    pads = prompts.shape[1] - lengths
    begin = {token for row in short for token in prompts[row, : pads[row]]}
    more = any(prompts[row, pads[row]] in begin for row in short)
    if len(begin) == 1 and not more and any(len(set(prompts[row, lengths[row] :])) > 1 for row in short):
        raise ValueError(
            f"prompt {short[0]} is padded on the left with the id {begin.pop()}: pad on the right (padding_side='right')"
        )


NO_LIMIT = 2**31 - 1


@named
@settled
def run(
    decoder: Decoder[State], params: PyTree, state: State, max_steps: jax.Array | int = NO_LIMIT,
    min_live: jax.Array | int = 1,
) -> State:  # fmt: skip
    """Steps until fewer than `min_live` rows are running, or `max_steps` times, in one `lax.while_loop`. `state` is donated.

    One program a decoder and state shape, whatever the two numbers; `run_program` is that program, to lower or to compile.
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


@settled
def insert(
    decoder: Decoder[State], params: PyTree, state: State, rows: Any, prompts: Any, lengths: Any, row_keys: Any, *, limit: Any,
    sampling: SamplingArrays, width: int | None, eos: Any = None, **more: Any,
) -> State:  # fmt: skip
    """`decoder.insert` under jit, with the state donated; `insert_program` is the jitted function.

    Raises:
      ValueError: where a row does not fit, see `check_rows`.
    """
    if more:
        check_keywords("insert", more, inspect.signature(decoder.insert).parameters)
    batch, capacity = state.tokens.shape
    check_rows(decoder, capacity, prompts, lengths, row_keys, limit, sampling, eos, rows, batch)
    if sampling.form != state.sampling.form:
        raise ValueError(
            f"rows with the sampling parameters {_named(sampling.form)} do not fit a state with {_named(state.sampling.form)}: "
            "make it with specjax.decoder.empty(..., form=sampling.form)"
        )
    return _put_in(
        decoder,
        params,
        state,
        rows,
        prompts,
        lengths,
        row_keys,
        limit=limit,
        sampling=sampling,
        eos=eos,
        width=width,
        **more,
    )


def _put_in(decoder, params, state, *rows, limit, sampling, eos, width, **more):
    """`insert_program` of what a host has too: it is sent before, which `jax_transfer_guard` allows."""
    rows, limit, sampling, eos = jax.device_put((rows, limit, sampling, eos))
    return insert_program(decoder, params, state, *rows, limit=limit, sampling=sampling, eos=eos, width=width, **more)


def _named(form: Form) -> str:
    return ", ".join(name + (f" {widths}" if widths else "") for name, widths in form)


insert_program = jax.jit(
    lambda decoder, params, state, *args, width, **kwargs: decoder.insert(params, state, *args, width=width, **kwargs),
    static_argnums=(0,),
    static_argnames=("width",),
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
      finish: a `Finish` value a row.
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
