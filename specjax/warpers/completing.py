"""How probable it is that a text is completed within a language in the tokens that are left, by a hidden Markov model.

The recursion over the product of an automaton and a hidden Markov model is that of Ctrl-G (Zhang et al. 2024,
arXiv:2406.13892), which Deco-G (arXiv:2510.03595) uses. In shapes `L` denotes how many tokens are left, `S` the states of the
table, `C` its classes, `H` hidden states, `U` tokens of the language, `V` the vocabulary, `E` pairs of states.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import Array
from specjax.constrain import Table
from specjax.constrain.edges import edges_of
from specjax.constrain.hmm import Hmm
from specjax.constrain.table import shown
from specjax.constrain.vocabulary import Vocabulary
from specjax.warpers.lists import rounded

MOST_ENTRIES = 1 << 23
"""Numbers of a guide, with its sizes rounded up to powers of two: 32 MiB for a row."""
MOST_OF_BATCH = 1 << 30
"""Numbers of the guides of all rows, each as large as the largest sizes among them: 4 GiB."""
CHUNK = 32
"""How many tokens more are computed in one call."""
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Guide:
    """A hidden Markov model beside the table of a constraint. Guides are equal if their digests are.

    Attributes:
      digest: of the hidden Markov model and the table, and L.
      table: the table's digest.
      following: `[S, C]` int32, of the table.
      kinds: `[U]` int32, the class of each token that some text of the language has.
      place: `[V]` int32, the place of each token among those; -1 for none.
      initial: `[H]` float32.
      transition: `[H, H]` float32.
      emission: `[H, U]` float32, of the tokens of the language.
      ahead: `[L, S, H]` float32: the probability that a text is completed within l more tokens after a token that a hidden
        state has written and that led to a state, up to a factor. What holds for L - 1 holds for more.
      scale: `[L, S]` float32, the logarithm of that factor; -inf if no text is completed.
    """

    digest: str
    table: str = dataclasses.field(compare=False, repr=False)
    following: np.ndarray = dataclasses.field(compare=False, repr=False)
    kinds: np.ndarray = dataclasses.field(compare=False, repr=False)
    place: np.ndarray = dataclasses.field(compare=False, repr=False)
    initial: np.ndarray = dataclasses.field(compare=False, repr=False)
    transition: np.ndarray = dataclasses.field(compare=False, repr=False)
    emission: np.ndarray = dataclasses.field(compare=False, repr=False)
    ahead: np.ndarray = dataclasses.field(compare=False, repr=False)
    scale: np.ndarray = dataclasses.field(compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.initial)

    @property
    def widths(self) -> tuple[int, ...]:
        """S, C, V, U, H and L."""
        length, states, hidden = self.ahead.shape
        return states, self.following.shape[1], len(self.place), len(self.kinds), hidden, length


def guide_of(value: Any, vocabulary: Vocabulary, room: int, others: Mapping[str, Any]) -> Guide:
    """The guide of a request.

    Args:
      value: the folder of a hidden Markov model, an `Hmm`, or a guide as it is.
      vocabulary: the model's.
      room: the most new tokens.
      others: the request's other compiled options, among them `constraint`.

    Raises:
      ValueError: one line that says what cannot be followed.
    """
    table = others.get("constraint")
    if table is None:
        raise ValueError("a guide leads to texts of a constraint: give one, or leave guide out")
    if not isinstance(table, Table):
        raise ValueError(f"{shown(table.line)}: a grammar has no table, so nothing can guide to it: leave guide out")
    if isinstance(value, Guide):
        if value.table != table.digest:
            raise ValueError(
                f"{shown(table.line)}: the guide was made for another constraint: give the folder of its hidden Markov model"
            )
        return value
    hmm = value if isinstance(value, Hmm) else Hmm.load(value)
    hmm.check(vocabulary)
    return guided(hmm, table, room)


def guided(hmm: Hmm, table: Table, room: int) -> Guide:
    """The guide to a table's language for texts of at most `room` tokens. Guides of the same levels share their memory.

    Raises:
      ValueError: if it is too large.
    """
    levels = _levels(hmm, table)
    ahead, scale = levels.upto(room)
    edges = levels.edges
    return Guide(
        f"{hmm.digest} {table.digest} {len(ahead)}", table.digest, table.following, levels.kinds, levels.place, hmm.initial,
        hmm.transition, edges.emission, ahead, scale,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _levels(hmm: Hmm, table: Table) -> "Levels":
    return Levels(hmm, table)


class Levels:
    """`ahead` and `scale` of a hidden Markov model and a table, for 0 tokens left and more.

    They grow as rooms ask for more, always by `CHUNK`, until nothing changes. So they do not depend on who asked before.
    """

    def __init__(self, hmm: Hmm, table: Table) -> None:
        self.edges = edges_of(table, hmm)
        self.kinds = table.classes[self.edges.tokens]
        self.place = np.full(len(table.classes), -1, np.int32)
        self.place[self.edges.tokens] = np.arange(len(self.edges.tokens))
        self._hmm, self._table, self._settled, self._lock = hmm, table, False, threading.Lock()
        self._check(1)
        ends = table.distance == 0
        self._ahead = np.repeat(ends[None, :, None], len(hmm), axis=2).astype(np.float32)
        self._scale = np.where(ends[None], 0, -np.inf).astype(np.float32)

    def upto(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        """`[L, S, H]` and `[L, S]` for at most `room` tokens.

        Raises:
          ValueError: if a guide with them is too large.
        """
        with self._lock:
            while not self._settled and len(self._ahead) < room:
                self._check(len(self._ahead))
                self._grow()
            count = max(1, min(room, len(self._ahead)))
            self._check(count)
            return self._ahead[:count], self._scale[:count]

    def _grow(self) -> None:
        """Sizes are rounded up, so that tables of about one size share a program. Edges from no state are dropped."""
        edges, states = self.edges, len(self._table)
        wide, spare = rounded(states), rounded(len(edges.begin)) - len(edges.begin)
        pad = lambda own, count, fill=0.0: np.pad(own, [(0, count)] + [(0, 0)] * (own.ndim - 1), constant_values=fill)
        given = pad(edges.begin, spare, wide), pad(edges.end, spare), pad(edges.weight, spare)
        now = pad(self._ahead[-1], wide - states), pad(self._scale[-1], wide - states, -np.inf)
        ended = np.arange(wide) == states - 1
        more = jax.device_get(longer(now, *given, self._hmm.transition, ended, CHUNK)[1])
        ahead, scale = (
            np.concatenate([old, new[:, :states]]) for old, new in zip((self._ahead, self._scale), more, strict=True)
        )
        begin = len(self._ahead)
        same = (ahead[begin:] == ahead[begin - 1 : -1]).all(axis=(1, 2))
        same &= (scale[begin:] == scale[begin - 1 : -1]).all(axis=1)
        self._settled = bool(same.any())
        kept = begin + int(same.argmax()) if self._settled else len(ahead)
        self._ahead, self._scale = ahead[:kept], scale[:kept]

    def _check(self, count: int) -> None:
        table, hmm = self._table, self._hmm
        widths = len(table), table.following.shape[1], len(self.place), len(self.kinds), len(hmm), count
        if entries(tuple(map(rounded, widths))) > MOST_ENTRIES:
            raise ValueError(
                f"{shown(table.line)}: with its {len(table)} states, {len(hmm)} hidden ones and {len(self.kinds)} tokens, "
                f"all rounded up to powers of two, a guide has more than {MOST_ENTRIES} numbers: lower max_new_tokens, "
                "train fewer states, or simplify the constraint"
            )


def entries(widths: tuple[int, ...]) -> int:
    """How many numbers a guide of these widths has, see `Guide.widths`."""
    states, kinds, vocab, tokens, hidden, length = widths
    ids = states * kinds + vocab + tokens
    return ids + hidden * (1 + hidden + tokens) + length * states * (hidden + 1)


def check_batch(rows: int, widths: tuple[int, ...]) -> None:
    """Raises ValueError if the guides of a batch are too large together."""
    if rows * entries(widths) > MOST_OF_BATCH:
        raise ValueError(
            f"the guides of {rows} rows have {rows * entries(widths)} numbers, more than {MOST_OF_BATCH}: take a smaller "
            "batch, or guides that are less large"
        )


@functools.partial(jax.jit, static_argnums=6)
def longer(
    now: tuple[Array, Array], begin: Array, end: Array, weight: Array, transition: Array, ended: Array, count: int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The probabilities for `count` more numbers of tokens left, by one scan.

    The probability with l + 1 left sums over what a hidden state writes next and where that leads:
    `W[l + 1, s, h] = sum over s' of weight[s, s', h] * sum over h' of transition[h, h'] * W[l, s', h']`.

    Args:
      now: `[S, H]` and `[S]`, for l tokens left, see `Guide`.
      begin: `[E]` int32, see `specjax.constrain.edges.Edges`; also end and weight.
      end: `[E]` int32.
      weight: `[E, H]`.
      transition: `[H, H]`.
      ended: `[S]` bool, states in which a text has ended.
      count: static.

    Returns:
      The last of them, and all, `[count, S, H]` and `[count, S]`.
    """
    states = ended.shape[0]

    def one(now, _):
        ahead, scale = now
        top = jax.ops.segment_max(scale[end], begin, states)
        base = jnp.where(top > -jnp.inf, top, 0.0)  # of a state without steps, too
        parts = weight * ahead[end] * jnp.exp(scale[end] - base[begin])[:, None]
        whole = jax.ops.segment_sum(parts, begin, states)
        whole = jnp.where(ended[:, None], 1.0, whole)
        after = jnp.matmul(whole, transition.T, precision=_EXACT)
        most = after.max(axis=1)
        some = most > 0
        new = jnp.where(some[:, None], after / jnp.where(some, most, 1.0)[:, None], 0.0)
        new_scale = jnp.where(some, base + jnp.log(jnp.where(some, most, 1.0)), -jnp.inf)
        new, new_scale = jnp.where(ended[:, None], 1.0, new), jnp.where(ended, 0.0, new_scale)
        return (new, new_scale), (new, new_scale)

    return jax.lax.scan(one, now, None, length=count)
