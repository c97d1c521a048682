"""Constraints: only texts of a language are written. The language is a table (`specjax.constrain`) that tokens walk."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.arrays import Array
from specjax.constrain import Grammar, Table, compiled, grammar, named_file, read
from specjax.warpers.base import Columns, Warper
from specjax.warpers.gaps import FAR, NONE, Moves
from specjax.warpers.lists import Shape, listing


def _widths(value: Any) -> tuple[int, int, int, int]:
    if not value:
        return 0, 0, 0, 1
    if isinstance(value, Grammar):
        return 0, 0, 0, 2
    if not isinstance(value, Table):
        raise ValueError(f"constraint {value!r:.40} is not compiled: specjax.constrain.compiled makes a table of it")
    return (*value.following.shape, len(value.classes), 1)


def _array(values: Sequence[Any], widths: tuple[int, ...]) -> dict[str, np.ndarray]:
    states, classes, vocab, handles = widths
    fill = lambda *shape: np.full((len(values), *shape), NONE, np.int32)
    out = {"following": fill(states, classes), "classes": fill(vocab), "distance": fill(states), "guess": fill(states)}
    for row, value in enumerate(values):
        for name, own in out.items() if isinstance(value, Table) else ():
            given = getattr(value, name)
            own[(row, *map(slice, given.shape))] = given
    own = [value.handle if isinstance(value, Grammar) else NONE for value in values]
    return {**out, "handle": np.broadcast_to(np.asarray(own, np.int32)[:, None], (len(values), handles - 1))}


def _sizes(column: Any) -> tuple[int, int, int, int]:
    return (*column["following"].shape[1:], column["classes"].shape[1], 1 + column["handle"].shape[1])


TABLE = Shape(read, _widths, _array, _sizes, of_ids=False)


def _field() -> Any:
    field = listing(
        'only texts of a language: "json:FILE", "json:{...}" (a JSON Schema), "regex:...", "choice:a|b", "grammar:FILE" or '
        '"nested:FILE"',
        "json:FILE|SCHEMA, regex:..., choice:a|b, grammar:FILE or nested:FILE",
        TABLE,
    )
    make = lambda value, vocabulary, room, others: compiled(value, vocabulary, room)
    metadata = {**field.metadata, "parse": str, "metavar": "LINE", "make": make, "file": named_file}
    return dataclasses.field(default=field.default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Constraint(Warper):
    """Removes the tokens after which no text of a language can be completed in the room that is left.

    The distribution of what stays is renormalised at each place. That is the usual local distribution of constrained
    decoding, not the model's own distribution given that the text is in the language. An end of text is left only where
    the language has one. If a row's limit cuts a text, the text is complete too.

    A row carries the state that its new text leads to. A node of a tree walks on from it along its path.

    Attributes:
      constraint: `following` `[B, S, C]`, `classes` `[B, V]`, `distance` and `guess` `[B, S]`, int32, of
        `specjax.constrain.Table`, padded with -1; `handle` `[B, H]` int32, of `specjax.constrain.Grammar`. H is 0 where no
        row has a grammar; no program asks the host then.
    """

    about = About("constraint", "writes only texts of a language", "arXiv:2307.09702", "same text")
    of_logits = True
    reads_text = True
    removes = True
    reads_limit = True
    walks = True
    fills = True

    constraint: Any = _field()

    def used(self, own: Columns) -> Array:
        table = own["constraint"]
        return (table["distance"][:, 0] != NONE) | (table["handle"] != NONE).any(axis=1)

    def moved(self, own: Columns, states: Array, tokens: Array) -> Array:
        table = own["constraint"]
        rows = jnp.arange(states.shape[0])[:, None]
        after = table["following"][rows, jnp.maximum(states, 0), table["classes"][rows, tokens]]
        return jnp.where(states == NONE, NONE, after)

    def guessed(self, own: Columns, states: Array) -> Array:
        found = own["constraint"]["guess"][jnp.arange(states.shape[0])[:, None], jnp.maximum(states, 0)]
        return jnp.where(states == NONE, NONE, found)

    def asks(self, own: Columns) -> Array | None:
        handle = own["constraint"]["handle"]
        return (handle[:, 0] != NONE) if handle.shape[1] else None

    def tried(self, own: Columns, text: Any, orders: Array, again: Array, vocab: int) -> Array:
        by_table = super().tried(own, dataclasses.replace(text, drafting=True), orders, again, vocab)
        asked = self.asks(own)
        if asked is None:
            return by_table
        given = (*_of_host(own["constraint"]["handle"][:, 0], text), orders, again)
        ask = lambda *arrays: grammar.tried(*map(np.asarray, arrays))
        found = jax.pure_callback(ask, jax.ShapeDtypeStruct(orders.shape, bool), *given)
        return jnp.where(asked[:, None, None], found, by_table)

    def filling(self, own: Columns, never: tuple[int, ...]) -> Moves:
        table = own["constraint"]
        if table["handle"].shape[1]:
            raise ValueError(
                "a grammar is followed from left to right, and a canvas has gaps: give a table (regex, json, choice, nested)"
            )
        return Moves.of(table, never)

    def warp(self, scores: Array, own: Columns, text: Any) -> Array:
        if not text.known:
            return scores
        handle = own["constraint"]["handle"]
        found = self._by_table(scores, own, text)
        if not handle.shape[1]:
            return found
        by_grammar = scores if text.drafting else _by_grammar(scores, handle[:, 0], text)
        return jnp.where((handle != NONE)[:, :, None], by_grammar, found)

    def _by_table(self, scores: Array, own: Columns, text: Any) -> Array:
        table, rows = own["constraint"], jnp.arange(scores.shape[0])[:, None]
        states = text.walked(self, own)
        after = table["following"][rows, jnp.maximum(states, 0)]
        far = jnp.where(after == NONE, FAR, table["distance"][rows[..., None], jnp.maximum(after, 0)])
        room = jnp.full_like(states, FAR) if text.limit is None else text.limit[:, None] - text.positions()
        ok = (far < room[..., None]) & (states != NONE)[..., None]
        # nothing goes on after a drafted token that is not allowed, and nobody asks: the scores stay finite there
        drafted = (text.below() >= 0).any(axis=-1)
        ok = ok | (drafted & ~ok.any(axis=-1))[..., None]
        classes = table["classes"][:, None, : scores.shape[-1]]
        allowed = jnp.take_along_axis(ok, jnp.broadcast_to(classes, (*ok.shape[:2], classes.shape[-1])), axis=-1)
        return jnp.where(allowed, scores, -jnp.inf)


def _of_host(handle: Array, text: Any) -> tuple[Array, Array, Array, Array]:
    """What the host reads of rows: their grammars, none of rows that do not matter, and where their new tokens are."""
    asked = handle if text.live is None else jnp.where(text.live, handle, NONE)
    return asked, text.tokens, jnp.zeros_like(text.length) if text.begin is None else text.begin, text.length


def _by_grammar(scores: Array, handle: Array, text: Any) -> Array:
    """Scores `[B, T, V]` without the tokens that a grammar forbids, which the host says."""
    paths, vocab = text.below(), scores.shape[-1]
    kind = jax.ShapeDtypeStruct((*scores.shape[:2], -(-vocab // 32)), jnp.int32)
    given = (*_of_host(handle, text), paths)

    def ask(*arrays):
        handles, tokens, begin, length, paths = map(np.asarray, arrays)
        return grammar.masks(handles, tokens, begin, length, paths, kind.shape[-1])

    words = jax.pure_callback(ask, kind, *given)
    bits = (words[..., None] >> jnp.arange(32)[None, None, None]) & 1
    return jnp.where(bits.reshape(*scores.shape[:2], -1)[..., :vocab] > 0, scores, -jnp.inf)
