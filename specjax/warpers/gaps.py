"""Which tokens may stand at the open places of a canvas, so that some text of a language fills it.

A table's states are followed from the beginning of the new text, and from its end back. A token may stand at a place if
it leads from a state that the text before it may reach to one from which the text after it can be completed. All
of this is forward-backward over a finite automaton, with sets of states for probabilities.

In shapes `B` denotes rows, `L` the canvas, `N` the places asked about, `S` the states and `C` the classes of tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import Array, Bool, Int
from specjax.warpers.lists import NONE

FAR = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaps:
    """Texts with open places.

    Attributes:
      tokens: `[B, L]` int32.
      open: `[B, L]` bool, the places without a token.
      begin: `[B]` int32, where the text of the language begins.
      end: `[B]` int32, where it ends at the latest; all up to there will be filled.
      live: `[B]` bool, rows that matter.
      never: static, ids that will not be written.
    """

    tokens: Int[Array, "B L"]
    open: Bool[Array, "B L"]
    begin: Int[Array, " B"]
    end: Int[Array, " B"]
    live: Bool[Array, " B"]
    never: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def first(self) -> Array:
        """The first open place `[B]`; `end` if there is none."""
        at = jnp.arange(self.open.shape[1], dtype=jnp.int32)[None]
        inside = self.open & (at >= self.begin[:, None]) & (at < self.end[:, None])
        return jnp.min(jnp.where(inside, at, self.end[:, None]), axis=1)

    def tail(self) -> Array:
        """The first place `[B]` from which on all are open, up to the end; `begin` if no token is known."""
        at = jnp.arange(self.open.shape[1], dtype=jnp.int32)[None]
        known = ~self.open & (at >= self.begin[:, None]) & (at < self.end[:, None])
        return jnp.max(jnp.where(known, at + 1, self.begin[:, None]), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """The tables of rows (`specjax.constrain.Table`) as they are followed over gaps; state S is the dead one.

    Attributes:
      after: `[B, S, C]` int32, the next state.
      classes: `[B, V]` int32, the class of every token; C for none.
      distance: `[B, S]` int32, the fewest tokens to the end of a text; `FAR` where there is none.
      written: `[B, C]` bool, classes with a token that may be written.
      even: `[B]` bool, whether a state reaches an end over n open places exactly if n is at least its distance. That
        is so if ends of text may be written, since more of them may follow the first.
    """

    after: Int[Array, "B S C"]
    classes: Int[Array, "B V"]
    distance: Int[Array, "B S"]
    written: Bool[Array, "B C"]
    even: Bool[Array, " B"]

    @classmethod
    def of(cls, table: Mapping[str, Any], never: tuple[int, ...]) -> "Moves":
        """From the columns of tables, padded with -1; `never` are ids that will not be written."""
        following, classes, distance = table["following"], table["classes"], table["distance"]
        states, count = following.shape[1:]
        after = jnp.where(following == NONE, states, following)
        classes = jnp.where(classes == NONE, count, classes)
        distance = jnp.where(distance == NONE, FAR, distance)
        may = jnp.ones(classes.shape[1:], bool).at[jnp.asarray(never, jnp.int32)].set(False, mode="drop")
        mark = lambda classes: jnp.zeros((count,), bool).at[classes].max(may, mode="drop")
        written = jax.vmap(mark)(classes)
        ends = _of(_closed(distance == 0), after) & written[:, None]
        goes_on = ends.any(axis=2) | (distance != 0)
        taken = (following != NONE).any(axis=1)
        return cls(after, classes, distance, written, goes_on.all(axis=1) & (written | ~taken).all(axis=1))

    def before(self, gaps: Gaps, on: Array, place: Array, later: Array) -> Array:
        """The states `[B, S]` before a place `[B]` from which states `later` `[B, S]` after it are reached."""
        token, is_open = _at(gaps.tokens, place), _at(gaps.open, place)
        real = place < gaps.end
        closed = _closed(later)
        known = _of(closed, self._by(token))
        some = lambda: (_of(closed, self.after) & self.written[:, None]).any(axis=2)
        wide = jax.lax.cond(jnp.any(on & real & is_open), some, lambda: known)
        return jnp.where(real[:, None], jnp.where(is_open[:, None], wide, known), self.distance == 0)

    def beyond(self, gaps: Gaps, place: Array, states: Array) -> Array:
        """The states `[B, S]` after a place `[B]` which states `[B, S]` before it reach."""
        token, is_open = _at(gaps.tokens, place), _at(gaps.open, place)
        kind = _at(self.classes, token)
        chosen = jnp.where(is_open[:, None], self.written, jnp.arange(self.written.shape[1])[None] == kind[:, None])
        mark = lambda after, goes: jnp.zeros((after.shape[0] + 1,), bool).at[after].max(goes)
        return jax.vmap(mark)(self.after, states[:, :, None] & chosen[:, None])[:, :-1]

    def back(self, gaps: Gaps, on: Array, low: Array, width: int) -> Array:
        """From which states the rest can be completed, `[width + 1, B, S]` bool: before the place `low` `[B]` and each of the
        next ones. Nothing is followed back where all is open up to the end: distances tell that.
        """
        top = jnp.where(self.even, jnp.maximum(gaps.tail(), low), gaps.end) - low
        top = jnp.max(jnp.where(on, top, 0))
        within = lambda step: self.distance <= jnp.maximum(gaps.end - low - step, 0)[:, None]
        found = jax.vmap(within)(jnp.arange(width + 1, dtype=jnp.int32))

        def one(carry):
            step, later, found = carry
            states = self.before(gaps, on, low + step - 1, later)
            return step - 1, states, found.at[step - 1].set(states, mode="drop")

        return jax.lax.while_loop(lambda carry: carry[0] > 0, one, (top, within(top), found))[2]

    def walked(self, gaps: Gaps, on: Array, low: Array) -> Array:
        """The state `[B]` before the place `low` `[B]`, up to which all is known."""

        def one(step, states):
            place = gaps.begin + step
            after = jnp.pad(self._by(_at(gaps.tokens, place)), ((0, 0), (0, 1)), constant_values=self.after.shape[1])
            return jnp.where(place < low, _at(after, states), states)

        count = jnp.max(jnp.where(on, low - gaps.begin, 0))
        return jax.lax.fori_loop(0, count, one, jnp.zeros_like(low))

    def completable(self, gaps: Gaps, on: Array) -> Array:
        """`[B]` bool: whether some text of the language fills the open places."""
        low = gaps.first()
        rest = self.back(gaps, on, low, 0)[0]
        return _at(_closed(rest), self.walked(gaps, on, low))

    def filled(self, scores: Array, gaps: Gaps, on: Array, at: Array) -> Array:
        """See `specjax.warpers.base.Filling`."""
        low = jnp.clip(at[:, 0], gaps.begin, gaps.end)
        found = self.possible(gaps, on, low, at.shape[1])
        place = at - low[:, None]
        kinds = jnp.take_along_axis(found, jnp.maximum(place, 0)[:, :, None], axis=1, mode="clip")
        classes = self.classes[:, None, : scores.shape[-1]]
        index = jnp.broadcast_to(classes, (*at.shape, classes.shape[-1]))
        allowed = jnp.take_along_axis(kinds, index, axis=2, mode="fill", fill_value=False)
        inside = (place >= 0) & (at < gaps.end[:, None])
        return jnp.where(allowed | ~inside[:, :, None], scores, -jnp.inf)

    def possible(self, gaps: Gaps, on: Array, low: Array, width: int) -> Array:
        """`[B, width, C]` bool: the classes that may stand at the place `low` `[B]` and the next ones, if all else stays.

        At a place with a token these are the ones that may stand there in its stead. All before `low` is known.
        """
        rest = self.back(gaps, on, low, width)
        count = jnp.minimum(width, jnp.max(jnp.where(on, gaps.end - low, 0)))

        def one(step, carry):
            states, found = carry
            goes = _of(_closed(rest[step + 1]), self.after) & states[:, :, None]
            return self.beyond(gaps, low + step, states), found.at[step].set(goes.any(axis=1))

        start = jnp.arange(self.distance.shape[1])[None] == self.walked(gaps, on, low)[:, None]
        none = jnp.zeros((width, *self.written.shape), bool)
        return jnp.swapaxes(jax.lax.fori_loop(0, count, one, (start, none))[1], 0, 1)

    def _by(self, token: Array) -> Array:
        """The states `[B, S]` after a token `[B]` from each state."""
        kind = _at(self.classes, token)
        own = jax.vmap(lambda after, kind: jnp.take(after, kind, axis=1, mode="fill", fill_value=after.shape[0]))
        return own(self.after, kind)


def _closed(states: Array) -> Array:
    """Sets of states `[B, S]` with the dead one, `[B, S + 1]`, which is in none."""
    return jnp.pad(states, ((0, 0), (0, 1)))


def _of(values: Array, index: Array) -> Array:
    """Each row's values `[B, M]` at its own indices `[B, ...]`."""
    return jax.vmap(lambda values, index: values[index])(values, index)


def _at(values: Array, place: Array) -> Array:
    """Each row's value at one index `[B]`; the last one's beyond the end."""
    return jnp.take_along_axis(values, place[:, None], axis=1, mode="clip")[:, 0]
