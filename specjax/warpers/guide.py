"""Guided constraints (Deco-G, arXiv:2510.03595): tokens are weighed by how probably a text is completed after them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.arrays import Array
from specjax.constrain import Hmm
from specjax.constrain.hmm import ABOUT
from specjax.warpers.base import Columns, Warper
from specjax.warpers.completing import Guide, check_batch, guide_of
from specjax.warpers.lists import NONE, Shape, listing

_LEAST = float(np.finfo(np.float32).tiny)


def _read(value: Any) -> Any:
    if isinstance(value, Guide | Hmm):
        return value
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, tuple | list) and not value:
        return ""
    raise TypeError("not a folder")


def _widths(value: Any) -> tuple[int, ...]:
    if not value:
        return (0,) * 6
    if not isinstance(value, Guide):
        raise ValueError(
            f"guide {value!r:.40} is not compiled: specjax.warpers.completing.guided makes one for a table"
        )
    return value.widths


def _array(values: Sequence[Any], widths: tuple[int, ...]) -> dict[str, np.ndarray]:
    check_batch(len(values), widths)
    states, kinds, vocab, tokens, hidden, length = widths
    ids = {"following": (states, kinds), "kinds": (tokens,), "place": (vocab,)}
    numbers = {
        "initial": (hidden,), "transition": (hidden, hidden), "emission": (hidden, tokens),
        "ahead": (length, states, hidden), "scale": (length, states),
    }  # fmt: skip
    out = {name: np.full((len(values), *shape), NONE, np.int32) for name, shape in ids.items()}
    out |= {name: np.zeros((len(values), *shape), np.float32) for name, shape in numbers.items()}
    last = np.zeros((len(values), 1), np.int32)
    for row, value in enumerate(values):
        for name, own in out.items() if isinstance(value, Guide) else ():
            given = getattr(value, name)
            own[(row, *map(slice, given.shape))] = given
        last[row] = len(value.ahead) - 1 if isinstance(value, Guide) else 0
    return {**out, "last": last}


def _sizes(column: Any) -> tuple[int, ...]:
    _, length, states, hidden = column["ahead"].shape
    return states, column["following"].shape[2], column["place"].shape[1], column["kinds"].shape[1], hidden, length


GUIDE = Shape(_read, _widths, _array, _sizes, of_ids=False)


def _file(value: str) -> Path | None:
    """The file that tells a folder's model from others."""
    return Path(value) / ABOUT if (Path(value) / ABOUT).is_file() else None


def _field() -> Any:
    about = "weigh what a constraint allows by a hidden Markov model, the folder of `specjax train hmm` (Deco-G)"
    field = listing(about, "the folder of a hidden Markov model", GUIDE)
    metadata = {**field.metadata, "parse": str, "metavar": "FOLDER", "make": guide_of, "file": _file}
    return dataclasses.field(default=field.default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Guided(Warper):
    """Adds to each token's logit the logarithm of the probability that the text is completed after it, in the language of
    the constraint and in the room that is left.

    A hidden Markov model of the model's texts says this probability. At temperature 1 a token has the model's
    probability times this one, renormalised. If the model were that hidden Markov model, texts would have the model's
    own distribution given the language.

    A row carries the state of the table and the distribution of the hidden state that writes the next token, given its
    new text. A node of a tree walks on from them along its path. Logits of tokens that no text of the language has are
    left as they are: the constraint removes them.

    Attributes:
      guide: arrays of `specjax.warpers.completing.Guide`, with `[B]` before their shapes, and `last` `[B, 1]` int32, L - 1.
        `following`, `kinds` and `place` are padded with -1, the others with 0.
    """

    about = About(
        "guide", "leads to texts of a constraint that are probable as a whole", "arXiv:2510.03595", "same text"
    )
    of_logits = True
    reads_text = True
    reads_limit = True
    walks = True
    aligns = "guided"

    guide: Any = _field()

    def used(self, own: Columns) -> Array:
        return own["guide"]["kinds"][:, 0] != NONE

    def start(self, own: Columns, batch: int) -> Any:
        initial = own["guide"]["initial"]
        return {"state": jnp.zeros((batch,), jnp.int32), "belief": initial}

    def moved(self, own: Columns, states: Any, tokens: Array) -> Any:
        table, rows = own["guide"], jnp.arange(tokens.shape[0])[:, None]
        place = table["place"][rows, tokens]
        known = (place != NONE) & (states["state"] != NONE)
        kind = table["kinds"][rows, jnp.maximum(place, 0)]
        after = table["following"][rows, jnp.maximum(states["state"], 0), jnp.maximum(kind, 0)]
        written = jnp.swapaxes(table["emission"], 1, 2)[rows, jnp.maximum(place, 0)]  # [B, T, H]
        belief = _stepped(states["belief"] * written, table["transition"])
        return {
            "state": jnp.where(known, after, NONE),
            "belief": jnp.where(known[..., None], belief, states["belief"]),
        }

    def warp(self, scores: Array, own: Columns, text: Any) -> Array:
        if not text.known:
            return scores
        table = own["guide"]
        at = text.walked(self, own)
        most = table["last"] + jnp.zeros_like(at["state"])
        left = most if text.limit is None else jnp.clip(text.limit[:, None] - text.positions() - 1, 0, most)
        gained = _gained(table, at, left)
        place = jnp.broadcast_to(table["place"][:, None, : scores.shape[-1]], scores.shape)
        added = jnp.take_along_axis(gained, jnp.maximum(place, 0), axis=-1)
        return scores + jnp.where((place != NONE) & (at["state"] != NONE)[..., None], added, 0.0)


def _gained(table: Any, at: Any, left: Array) -> Array:
    """`[B, T, U]`: the logarithm of the probability that a text is completed after each token of the language; 0 where that
    is impossible, since the constraint removes such tokens.

    Sums over hidden states are taken one after the other, so they do not depend on T, and no array has C, H and U.
    """
    rows = jnp.arange(left.shape[0])[:, None]
    after = table["following"][rows, jnp.maximum(at["state"], 0)]  # [B, T, C]
    where = rows[..., None], left[..., None], jnp.maximum(after, 0)
    ahead, scale = table["ahead"][where], table["scale"][where]  # [B, T, C, H] and [B, T, C]
    scale = jnp.where(after == NONE, -jnp.inf, scale)
    shape = (*left.shape, table["kinds"].shape[1])
    kinds = jnp.broadcast_to(jnp.maximum(table["kinds"], 0)[:, None], shape)

    def one(hidden, sums):
        written = at["belief"][..., hidden, None] * table["emission"][:, None, hidden]
        return sums[0] + written, sums[1] + written * jnp.take_along_axis(ahead[..., hidden], kinds, axis=-1)

    zeros = jnp.zeros(shape)
    whole, completed = jax.lax.fori_loop(0, table["emission"].shape[1], one, (zeros, zeros))
    log = lambda x: jnp.log(jnp.maximum(x, _LEAST))  # of what the hidden Markov model never writes, nothing is removed
    scale = jnp.take_along_axis(scale, kinds, axis=-1)
    return jnp.where(scale > -jnp.inf, log(completed) + scale - log(whole), 0.0)


def _stepped(weights: Array, transition: Array) -> Array:
    """The distributions `[B, T, H]` of the next hidden state, from weights `[B, T, H]` of this one; 0 where all weights are.

    Sums are taken one after the other, as in `_gained`: a node has the same bits however many nodes a step has.
    """
    weights = weights / jnp.maximum(weights.max(axis=-1, keepdims=True), _LEAST)

    def one(hidden, sums):
        own = weights[..., hidden, None]
        return sums[0] + own, sums[1] + own * transition[:, None, hidden]

    start = jnp.zeros((*weights.shape[:-1], 1)), jnp.zeros(weights.shape)
    whole, after = jax.lax.fori_loop(0, weights.shape[-1], one, start)
    return after / jnp.maximum(whole, _LEAST)
