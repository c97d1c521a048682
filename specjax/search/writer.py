"""Rows that a model continues step by step, from the host: write to a step's end, read another model's text, go back, fork.

A row keeps its cache between calls, and going back is a shorter length. Of a model with running states, which no length takes
back, the states before the last calls are kept, and what a row keeps of its text after them is read again. In the shape
descriptions `B` denotes rows, `W` tokens that are read together, `M` ids that are asked for.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.decoder import Needs
from specjax.lm import Block, Wants
from specjax.prompts import Prompts
from specjax.sampling.noise import keys_of
from specjax.search.stepwise import Asked
from specjax.settings import settled
from specjax.sharding.distributed import to_host
from specjax.speculative import Speculative, prefill_columns, prefill_width, speculative, write
from specjax.state import Finish

Array = jax.Array

MARKS = 2
"""How many calls a row goes back without reading its text from the beginning, in a model with running states."""
WIDTHS = (16, 32, 64)
"""How many tokens are read together: the first width that holds the text to be read, or the last one several times."""


@dataclasses.dataclass(frozen=True)
class Heard:
    """The model's judgement of tokens that it read.

    Attributes:
      logprobs: for every row, natural logarithms under the model's own softmax, one per token.
      after: `[B, M]` float32, log-probabilities of the ids that were asked for as the next token.
      top: `[B]` int32, the likeliest next token.
    """

    logprobs: list[list[float]]
    after: np.ndarray
    top: np.ndarray


class Writer:
    """Rows of one model.

    Args:
      model: a `specjax.models.Model`.
      rows: B.
      asked: all prompts that will enter; every row has their sampling options.
      stops: ids that end a step; the ids that end a text are the model's own.
      room: tokens that a row may hold beyond its prompt and its new tokens.
      logprobs: whether the state keeps log-probabilities of the tokens that it writes.
      way: a speculative decoder of this model and its parameters; None: plain decoding.
    """

    def __init__(
        self, model: Any, rows: int, asked: Asked, stops: Sequence[int], *, room: int = 0, logprobs: bool = False,
        way: tuple[Speculative, Any] | None = None,
    ):  # fmt: skip
        self.model, self.rows, self.stops = model, rows, tuple(stops)
        self.asked = asked
        usual = lambda: (speculative(model.lm, logprobs=logprobs), {"target": model.params, "draft": None})
        self.plain, self.params = usual() if way is None else way
        greedy = set(asked.sampling) <= {"temperature"} and not asked.sampling.get("temperature")
        self.decoder = self.plain.fitted(Needs(greedy=greedy))
        self.ends = len({*self.stops, *model.eos_ids}) or 1
        longest = min(asked.longest + asked.max_new_tokens, model.max_length)
        needed = longest + room + WIDTHS[-1] + 1 + self.decoder.slack
        self.capacity = -(-needed // 128) * 128
        self.most = np.zeros(rows, np.int64)
        self.length = np.ones(rows, np.int64)
        self.begin = np.ones(rows, np.int64)
        self.tokens = np.zeros((rows, self.capacity), np.int32)
        self.failed = np.zeros(rows, bool)
        self.passes = np.zeros(rows, np.int64)
        self.state: Any = self.blank(rows)
        self.marks: list[tuple[np.ndarray, Any]] = []

    def blank(self, rows: int) -> Any:
        """A state of so many free rows, of the same form as these."""
        form = self.asked.sampling_of(1).form
        dtype = jax.tree.leaves(self.params["target"])[0].dtype
        return decoding.empty(self.plain, self.params, rows, self.capacity, dtype, self.ends, form=form)

    @property
    def longest(self) -> int:
        """How many tokens a row may hold."""
        return min(self.model.max_length, self.capacity - WIDTHS[-1] - 1 - self.decoder.slack)

    def enter(self, asked: Asked) -> None:
        """Puts prompts into the first rows, read up to their last token; the other rows are free."""
        count = len(asked.ids)
        self.clear()
        self.most[:count] = [min(len(own) + asked.max_new_tokens, self.longest) for own in asked.ids]
        self.put(dict(enumerate(asked.ids)), asked.keys, self.rows)
        self._set(length=self.length)  # of rows that are free now too
        self.tokens = to_host(self.state.tokens).copy()

    def clear(self) -> None:
        """Frees all rows."""
        self.most[:], self.passes[:], self.failed[:] = 0, 0, False
        self.length[:] = self.begin[:] = 1
        self.marks = []

    def put(
        self, texts: Mapping[int, Sequence[int]], keys: np.ndarray, lanes: int, new: Mapping[int, int] | None = None
    ) -> None:
        """Reads whole texts into rows, up to their last token, in place of what these held; the other rows stay.

        Args:
          texts: by row; `most` has the rows' limits.
          keys: `[B, 2]` uint32, key data of the rows.
          lanes: how many rows one program reads; rows beyond the texts are padding.
          new: how many tokens at the end of each text were written after its prompt; None: none of them.
        """
        for lengths, _ in self.marks:
            lengths[list(texts)] = self.capacity  # states of another text, which no length goes back to
        widths = {row: prefill_width(len(own)) for row, own in texts.items()}
        for width in sorted(set(widths.values())):
            alike = [row for row in texts if widths[row] == width]
            for at in range(0, len(alike), lanes):
                self._put({row: texts[row] for row in alike[at : at + lanes]}, keys, lanes, width)
        if new is not None:
            self.begin[list(texts)] = [len(own) - new[row] for row, own in texts.items()]
            self._set(prompt_length=self.begin)

    def _put(self, texts, keys, lanes, width):
        """As `put`, for texts of one prefill width, `lanes` at most."""
        size = prefill_columns(max(map(len, texts.values())), width, self.capacity)
        tokens, lengths = np.zeros((lanes, max(size, 2)), np.int32), np.ones(lanes, np.int32)
        own, places, most = np.zeros((lanes, 2), np.uint32), np.full(lanes, self.rows), np.full(lanes, 2)
        for lane, (row, text) in enumerate(texts.items()):
            tokens[lane, : len(text)], lengths[lane] = text, len(text)
            own[lane], places[lane], most[lane] = keys[row], row, self.most[row]
            self.tokens[row, : len(text)] = text
            self.length[row] = self.begin[row] = len(text)
            self.failed[row] = False
        prompts = Prompts(
            tokens,
            lengths,
            keys_of(jax.device_put(own)),
            most.astype(np.int32),
            self.asked.sampling_of(lanes),
            self._eos(False)[:1].repeat(lanes, axis=0),
            width,
        )
        self.state = decoding.insert(self.plain, self.params, self.state, places, prompts)

    def _set(self, **fields: np.ndarray) -> None:
        own = {name: value.astype(np.int32) for name, value in fields.items()}
        self.state = dataclasses.replace(self.state, **jax.device_put(own))

    def _eos(self, step: bool) -> np.ndarray:
        ids = sorted({*self.model.eos_ids, *(self.stops if step else ())})
        return np.broadcast_to(np.asarray([*ids, *[-1] * (self.ends - len(ids))], np.int32), (self.rows, self.ends))

    def write(self, rows: Any, most: Any, *, step: bool = True) -> list[list[int]]:
        """Continues some rows, to a step's end or the text's.

        Args:
          rows: `[B]` bool.
          most: the most tokens; one number or `[B]`.
          step: whether to stop at a step's end; otherwise only at the text's end.

        Returns:
          The new tokens of every row; none in the other rows and where there is no room.
        """
        before, steps = self.length.copy(), to_host(self.state.stats.steps)
        limit = np.minimum(before + most, self.most)
        live = np.asarray(rows) & (limit > before) & ~self.failed
        if live.any():
            self._mark()
            self._set(finish=np.where(live, Finish.RUNNING, Finish.LENGTH), limit=limit, eos=self._eos(step))
            self.state = decoding.run(self.decoder, self.params, self.state)
            self.hear()
            self.passes += to_host(self.state.stats.steps) - steps
        return [self.tokens[row, before[row] : self.length[row]].tolist() for row in range(self.rows)]

    def hear(self) -> None:
        """Copies to the host what the state holds."""
        names = ("tokens", "length", "finish")
        host = to_host({name: getattr(self.state, name) for name in names})
        self.tokens, self.length = host["tokens"].copy(), host["length"].astype(np.int64)
        self.failed = self.failed | (host["finish"] == Finish.ERROR)

    def read(self, texts: Sequence[Sequence[int]], ids: Sequence[int] = (0,)) -> Heard:
        """Appends tokens to rows and returns the model's judgement of them: one pass per row for up to 64 tokens.

        Args:
          texts: for every row; empty in rows that stay as they are.
          ids: ids for whose log-probabilities as the next token the caller asks.

        Raises:
          ValueError: if they do not fit.
        """
        counts = np.asarray([len(text) for text in texts])
        if (over := self.length + counts > self.capacity - WIDTHS[-1] - 1).any():
            raise ValueError(f"row {int(np.flatnonzero(over)[0])} has no room for {int(counts.max())} more tokens")
        if counts.any():
            self._mark()
        width = _width(counts)
        logprobs: list[list[float]] = [[] for _ in texts]
        after, top = np.full((self.rows, len(ids)), -np.inf, np.float32), np.zeros(self.rows, np.int32)
        for at in range(0, int(counts.max()), width):
            part = np.full((self.rows, width), -1, np.int32)
            count = np.clip(counts - at, 0, width)
            for row, text in enumerate(texts):
                part[row, : count[row]] = text[at : at + width]
            given = jax.device_put((part, count.astype(np.int32), np.asarray(ids, np.int32)))
            self.state, *said = _read(self.decoder, self.params, self.state, *given)
            own, dist, likeliest = to_host(said)
            for row in np.flatnonzero(count):
                logprobs[row] += own[row, : count[row]].tolist()
                after[row], top[row] = dist[row], likeliest[row]
            self.passes += count > 0
        self.hear()
        return Heard(logprobs, after, top)

    def back(self, lengths: np.ndarray) -> None:
        """Takes back the tokens after these lengths `[B]`; what was computed for the rest stays."""
        shorter = np.minimum(self.length, lengths)
        if jax.tree.leaves(self.decoder.target.states(self.state.cache)) and (shorter < self.length).any():
            self._again(shorter)
        self.length = shorter
        self._set(length=self.length)

    def _mark(self) -> None:
        """Keeps the states of all rows, if the model has any."""
        states = self.decoder.target.states(self.state.cache)
        if jax.tree.leaves(states):
            self.marks = [*self.marks[1 - MARKS :], (self.length.copy(), jax.tree.map(jnp.copy, states))]

    def _again(self, shorter: np.ndarray) -> None:
        """Gives rows that become `shorter` `[B]` the newest kept states of no longer text, and reads the rest again."""
        states = lambda of: self.decoder.target.states(of)
        blank = (np.ones(self.rows, np.int64), states(self.decoder.target.init_cache(self.rows, 1, jnp.float32)))
        choices = [(self.length, states(self.state.cache)), blank, *self.marks]
        lengths = np.stack([own for own, _ in choices])
        fits = np.where(lengths <= shorter, np.arange(len(choices))[:, None], 0)
        which = np.where(shorter < self.length, fits.max(axis=0), 0)
        known = lengths[which, np.arange(self.rows)]
        given = jax.device_put(which.astype(np.int32))
        self.state = _restored(self.decoder, self.state, [own for _, own in choices[1:]], given)
        counts = np.where(which > 0, shorter - known, 0)
        width = _width(counts)
        for at in range(0, int(counts.max()), width):
            count = np.clip(counts - at, 0, width)
            begin = np.where(count > 0, known - 1 + at, self.length - 1)
            begin, count = jax.device_put((begin.astype(np.int32), count.astype(np.int32)))
            self.state = _read_again(self.decoder, width, self.params, self.state, begin, count)
            self.passes += to_host(count) > 0

    def fork(self, pool: Any, slots: Any, keys: np.ndarray) -> None:
        """Makes every row continue a row of another state, with its own key.

        Args:
          pool: from `blank`.
          slots: B of its rows.
          keys: `[B, 2]` uint32, key data.
        """
        taken, own = jax.device_put((np.asarray(slots, np.int32), keys))
        self.state = _taken(self.decoder, pool, taken, keys_of(own))
        self.failed[:] = False
        self.marks = []
        host = to_host((self.state.tokens, self.state.length, self.state.prompt_length))
        self.tokens, self.length, self.begin = host[0].copy(), host[1].astype(np.int64), host[2].astype(np.int64)

    def keep(self, pool: Any, slots: Any) -> Any:
        """The pool, which is donated, with every row copied into one of its places; a place outside it drops the row."""
        return _kept(self.decoder, pool, self.state, jax.device_put(np.asarray(slots, np.int32)))

    def new(self, row: int) -> list[int]:
        """A row's tokens after its prompt."""
        return self.tokens[row, self.begin[row] : self.length[row]].tolist()

    def ended(self, row: int) -> bool:
        """Whether a row's text has ended with EOS."""
        return self.length[row] > self.begin[row] and int(self.tokens[row, self.length[row] - 1]) in self.model.eos_ids

    def over(self, row: int) -> bool:
        """Whether a row cannot continue: its text ended, it is at its limit, or its logits were not finite."""
        return bool(self.ended(row) or self.length[row] >= self.most[row] or self.failed[row])

    def reason(self, row: int) -> str:
        """Why a text ends, as in `Written.finish_reason`."""
        return "eos" if self.ended(row) else "error" if self.failed[row] else "length"


def _width(counts: np.ndarray) -> int:
    """How many tokens are read together, where rows have so many."""
    return next((width for width in WIDTHS if width >= counts.max()), WIDTHS[-1])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
@settled
def _restored(decoder, state, kept: list[Any], which: Array):
    """The state in which a row whose `which` `[B]` is n > 0 has the n-th of the `kept` states."""
    lm = decoder.target

    def one(now, *others):
        return functools.reduce(
            lambda made, own: jnp.where(
                (which == own[0]).reshape(-1, *[1] * (now.ndim - 1)), own[1].astype(now.dtype), made
            ),
            enumerate(others, 1),
            now,
        )

    states = jax.tree.map(one, lm.states(state.cache), *kept)
    return dataclasses.replace(state, cache=lm.with_states(state.cache, states))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
@settled
def _read_again(decoder, width, params, state, begin: Array, count: Array):
    """The state after `count` `[B]` of `width` tokens from `begin` `[B]` on, which are in the text already."""
    positions = begin[:, None] + jnp.arange(width)[None]
    tokens = jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")
    output = decoder.target(params["target"], Block(tokens, positions, begin), state.cache, wants=Wants())
    cache = decoder.target.commit(state.cache, output.delta, None, begin, count)
    return dataclasses.replace(state, cache=cache)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
@settled
def _read(decoder, params, state, new: Array, count: Array, ids: Array):
    """The state with `count` `[B]` of the tokens `new` `[B, W]` after every text, and `Heard` as arrays."""
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([root, new], axis=1)
    begin = state.length - 1  # the last token of a text has no entry in the cache yet
    positions = begin[:, None] + jnp.arange(tokens.shape[1])[None]
    output = decoder.target(params["target"], Block(tokens, positions, begin), state.cache, wants=Wants(logits=True))
    dists = jax.nn.log_softmax(output.logits, axis=-1)
    own = jnp.take_along_axis(dists[:, :-1], jnp.maximum(new, 0)[:, :, None], axis=2)[:, :, 0]
    last = jnp.take_along_axis(dists, count[:, None, None], axis=1)[:, 0]
    # the last token is read too, for the next token's logits; the next pass writes its entry anew
    cache = decoder.target.commit(state.cache, output.delta, None, begin, count)
    text = write(state.tokens, new, state.length)
    state = dataclasses.replace(state, tokens=text, length=state.length + count, cache=cache)
    return state, own, last[:, ids], jnp.argmax(last, axis=1)


@functools.partial(jax.jit, static_argnums=0)
@settled
def _taken(decoder, pool, slots: Array, keys: Array):
    own = lambda leaf, axes: leaf[slots] if axes[:1] == ("batch",) else leaf
    return dataclasses.replace(jax.tree.map(own, pool, decoder.axes(pool)), key=keys)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
@settled
def _kept(decoder, pool, state, slots: Array):
    return pool.place(slots, state, decoder.axes(pool))
