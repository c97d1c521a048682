"""How probable it is that a text is completed within a language in the tokens that are left, by a hidden Markov model.

The recursion over the product of an automaton and a hidden Markov model is that of Ctrl-G (Zhang et al. 2024,
arXiv:2406.13892), which Deco-G (arXiv:2510.03595) uses. In shapes `L` denotes how many tokens are left, `S` the states of the
table, `C` its classes, `H` hidden states, `U` tokens of the language, `V` the vocabulary, `E` pairs of states.
"""

import dataclasses
import functools
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

MOST_ENTRIES = 1 << 24
"""Numbers of a guide: 64 MiB for a row, and more once its sizes are rounded up to powers of two."""
CHUNK = 32
"""How many tokens more are computed in one call."""
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Guide:
    """A hidden Markov model beside the table of a constraint. Guides are equal if their digests are.

    Attributes:
      digest: of the hidden Markov model, the table and the room.
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
        return value
    hmm = value if isinstance(value, Hmm) else Hmm.load(value)
    hmm.check(vocabulary)
    return guided(hmm, table, room)


@functools.lru_cache(maxsize=16)
def guided(hmm: Hmm, table: Table, room: int) -> Guide:
    """The guide to a table's language for texts of at most `room` tokens.

    Raises:
      ValueError: if it is too large.
    """
    edges = edges_of(table, hmm)
    ahead, scale = _ahead(hmm, table, edges, room)
    place = np.full(len(table.classes), -1, np.int32)
    place[edges.tokens] = np.arange(len(edges.tokens))
    return Guide(
        f"{hmm.digest} {table.digest} {room}", table.following, table.classes[edges.tokens], place, hmm.initial,
        hmm.transition, edges.emission, ahead, scale,
    )  # fmt: skip


def _ahead(hmm: Hmm, table: Table, edges: Any, room: int) -> tuple[np.ndarray, np.ndarray]:
    """`ahead` and `scale` for 0 tokens left and more, until nothing changes or the room ends."""
    states, hidden = len(table), len(hmm)
    rest = edges.weight.size + edges.emission.size
    _check_size(hmm, table, rest + states * hidden)
    ends = table.distance == 0
    now = np.repeat(ends[:, None], hidden, axis=1).astype(np.float32), np.where(ends, 0, -np.inf).astype(np.float32)
    found = [tuple(own[None] for own in now)]
    ended = jnp.arange(states) == states - 1
    given = jax.device_put((edges.begin, edges.end, edges.weight, hmm.transition))
    while (count := sum(len(own[0]) for own in found)) < room:
        now, more = longer(now, *given, ended, min(CHUNK, room - 1) or 1)
        more = jax.device_get(more)
        same = [np.array_equal(own[0], found[-1][i][-1]) for i, own in enumerate(more)]
        if all(same):
            break
        settled = np.all([(own[1:] == own[:-1]).reshape(len(own) - 1, -1).all(axis=1) for own in more], axis=0)
        kept = int(np.flatnonzero(settled)[0]) + 1 if settled.any() else len(more[0])
        found.append(tuple(own[:kept] for own in more))
        _check_size(hmm, table, rest + (count + kept) * states * hidden)
        if kept < len(more[0]):
            break
    ahead, scale = (np.concatenate([own[i] for own in found])[:room] for i in (0, 1))
    return ahead, scale


def _check_size(hmm: Hmm, table: Table, entries: int) -> None:
    if entries > MOST_ENTRIES:
        raise ValueError(
            f"{shown(table.line)}: with its {len(table)} states, {len(hmm)} hidden ones and so many tokens, a guide has more "
            f"than {MOST_ENTRIES} numbers: lower max_new_tokens, train fewer states, or simplify the constraint"
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
