"""The base of warpers: functions from the scores of a text's next token to other scores, with parameters for each row.

In shapes `B` denotes rows, `T` positions, `V` the vocabulary, `L` the text buffer, `D` the deepest node of a tree.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.arrays import Array, Bool, Int
from specjax.warpers.gaps import Gaps

Columns = Mapping[str, Any]
"""A warper's own parameters by name: an array `[B]` each, or `[B, ...]` for lists (`specjax.warpers.lists`)."""


def parameter(default: float | None, help: str, valid: str, holds: Callable[[Any], Any], switch: bool = True) -> Any:
    """A field that is a number.

    Args:
      default: its value if nobody sets it; for a switch, the value at which the warper changes nothing. None is NaN in
        a column, for the warper to fill in.
      help: what it does, in a few words.
      valid: the values that it may have, for errors.
      holds: whether a value, or each of an array of them, is valid.
      switch: whether a value other than the default turns the warper on.
    """
    return dataclasses.field(default=default, metadata={"help": help, "valid": valid, "holds": holds, "switch": switch})


@dataclasses.dataclass(frozen=True)
class Text:
    """The text before each of T positions: the row's text, then the path to a node of a tree.

    Attributes:
      tokens: `[B, L]` int32, the rows' text.
      length: `[B]` int32, how much of it is real.
      begin: `[B]` int32, how much of it is the prompt; None: nothing.
      eos: `[B, K]` int32, ids that end a row, padded with -1; None: none.
      paths: makes `[B, T, D]` int32, the tokens below the text for each position, -1 for none; None: nothing, and T is
        1.
      uniform: from positions `[B, T]` to numbers in [0, 1) of the rows' own noise.
      carried: by a warper's first parameter: the sums `[B]` over the new tokens of `tokens` (float32), or the states
        `[B, ...]` that they lead to, for warpers that have one; None: nothing was drawn yet, and states are not known.
      partial: static, whether the scores are for only some tokens, as those of a draft head may be.
      limit: `[B]` int32, the length at which the row stops; None: not known.
      drafting: static, whether scores are a draft's, which is verified later.
      known: static, whether `paths` tells all tokens before each position; some drafters rank tokens whose path they do
        not know yet.
      live: `[B]` bool, rows whose scores matter; no host is asked about the others. None: all.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    begin: Int[Array, " B"] | None = None
    eos: Int[Array, "B K"] | None = None
    paths: Callable[[], Array] | None = None
    uniform: Callable[[Array], Array] | None = None
    carried: Mapping[str, Any] | None = None
    partial: bool = False
    limit: Int[Array, " B"] | None = None
    known: bool = True
    drafting: bool = False
    live: Bool[Array, " B"] | None = None

    def below(self) -> Array:
        """`[B, T, D]`; D may be 0."""
        return jnp.zeros((*self.length.shape, 1, 0), jnp.int32) if self.paths is None else self.paths()

    def positions(self) -> Array:
        """`[B, T]`, the positions of the tokens to be drawn."""
        return self.length[:, None] + (self.below() >= 0).sum(axis=-1)

    def counts(self, vocab: int, dtype: Any, begin: Array | None = None) -> Array:
        """How often (for bool: whether) each id occurs from place `begin` `[B]` on, `[B, T, V]`; T is 1 without paths."""
        at, rows = jnp.arange(self.tokens.shape[1])[None], jnp.arange(self.tokens.shape[0])[:, None]
        real = (at < self.length[:, None]) & (True if begin is None else at >= begin[:, None])
        found = jnp.zeros((self.tokens.shape[0], vocab), dtype)
        add = lambda at: at.set(True, mode="drop") if dtype is bool else at.add(1, mode="drop")
        found = add(found.at[rows, jnp.where(real, self.tokens, vocab)])[:, None, :]
        paths = self.below()
        if paths.shape[-1] == 0:
            return found
        found = jnp.broadcast_to(found, (*paths.shape[:2], vocab))
        nodes = jnp.arange(paths.shape[1])[None, :, None]
        return add(found.at[rows[:, :, None], nodes, jnp.where(paths >= 0, paths, vocab)])

    def summed(self, start: Array, cost: Array) -> Array:
        """`[B, T]`: a sum over the tokens drawn before each position.

        A position adds its last token's cost, at the place where that token was drawn, to the sum of the position
        before it, in the order of the text. So the sum does not depend on how many tokens each step brings. If the
        position before is not among the T, as on a level of a draft that is still growing, the sum is the text's.

        Args:
          start: `[B]`, of the text itself.
          cost: `[B, T, V]`, what drawing each token at each position adds.
        """
        paths = self.below()
        total = jnp.broadcast_to(start[:, None], cost.shape[:2])
        if paths.shape[-1] == 0 or self.partial:
            return total
        depth = (paths >= 0).sum(axis=-1)
        last = jnp.maximum(depth - 1, 0)[..., None]
        above = jnp.where(jnp.arange(paths.shape[-1])[None, None] == depth[..., None] - 1, -1, paths)
        same = (above[:, :, None] == paths[:, None]).all(axis=-1) & (depth > 0)[..., None]
        parent, known = jnp.argmax(same, axis=-1), same.any(axis=-1)
        at = parent, jnp.maximum(jnp.take_along_axis(paths, last, axis=-1)[..., 0], 0)
        added = jax.vmap(lambda cost, parent, token: cost[parent, token])(cost, *at)
        for _ in range(paths.shape[-1]):  # each round makes one more level right
            total = jnp.where(known, jnp.take_along_axis(total, parent, axis=1) + added, total)
        return total

    def walked(self, warper: "Warper", own: "Columns") -> Any:
        """The states `[B, T, ...]` of a warper at each position, from the text's state along the path.

        A text whose state is not `carried` is walked from its first new token on.

        Args:
          warper: one that walks.
          own: its parameters.
        """
        name, carried = warper.switches[0], {} if self.carried is None else self.carried
        states = carried[name] if name in carried else self._from_begin(warper, own)
        paths = self.below()
        states = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*paths.shape[:2], *x.shape[1:])), states)
        for step in range(paths.shape[-1]):
            token = paths[..., step]
            states = chosen(token >= 0, warper.moved(own, states, jnp.maximum(token, 0)), states)
        return states

    def _from_begin(self, warper: "Warper", own: "Columns") -> Any:
        """The state `[B, ...]` after the new tokens of `tokens`."""
        begin = jnp.zeros_like(self.length) if self.begin is None else self.begin

        def one(step, states):
            at = (begin + step)[:, None]
            token = jnp.take_along_axis(self.tokens, jnp.minimum(at, self.tokens.shape[1] - 1), axis=1)
            return chosen(at < self.length[:, None], warper.moved(own, states, jnp.maximum(token, 0)), states)

        start = jax.tree.map(lambda x: x[:, None], warper.start(own, self.length.shape[0]))
        states = jax.lax.fori_loop(0, jnp.max(self.length - begin), one, start)
        return jax.tree.map(lambda x: x[:, 0], states)

    def each(self, function: Callable[..., Array], scores: Array, *own: Any) -> Array:
        """`function(tokens [L], length [], scores [V], *own)` for every position's whole text, as `[B, T, V]`.

        Args:
          function: of one text; L may be more than the rows' L.
          scores: `[B, T, V]`.
          *own: arrays, or trees of arrays, that lead with `[B]`.
        """
        paths, rest = self.below(), (None,) * len(own)
        if paths.shape[-1] == 0:
            plain = lambda scores, tokens, length, *own: function(tokens, length, scores, *own)
            return jax.vmap(jax.vmap(plain, in_axes=(0, None, None, *rest)))(scores, self.tokens, self.length, *own)

        def node(scores, path, tokens, length, *own):
            real = path >= 0
            at = jnp.where(real, length + jnp.cumsum(real) - 1, tokens.shape[0])
            return function(tokens.at[at].set(path, mode="drop"), length + real.sum(), scores, *own)

        wide = jnp.pad(self.tokens, ((0, 0), (0, paths.shape[-1])))
        return jax.vmap(jax.vmap(node, in_axes=(0, 0, None, None, *rest)))(scores, paths, wide, self.length, *own)


class Filling(Protocol):
    """What a warper that `fills` knows of canvases with open places."""

    def filled(self, scores: Array, gaps: Gaps, on: Array, at: Array) -> Array:
        """Scores `[B, N, V]` of tokens at places of a canvas without those that are forbidden there.

        Args:
          scores: `[B, N, V]`.
          gaps: the canvas.
          on: `[B]` bool, rows that use the warper and matter.
          at: `[B, N]` int32, places in sequence; all before the first of them is known.
        """
        ...

    def completable(self, gaps: Gaps, on: Array) -> Array:
        """`[B]` bool: whether the open places of a canvas can be filled."""
        ...


@dataclasses.dataclass(frozen=True)
class Warper(abc.ABC):
    """Changes the scores of the next token, for the rows that ask for it.

    Its fields are its parameters (`parameter`, or `specjax.warpers.lists.listing`), at their defaults: each is an
    option of every prompt, under its own name.

    Its result at a position may depend on the text and the path before it, on the row's noise at that place, on a sum
    over the tokens drawn so far (`carries`), and on a state that they lead to (`walks`), but on nothing else. So it is
    the same whatever was drafted, and a seed keeps its text.

    Class attributes:
      of_logits: whether it comes before the temperature and applies to greedy rows too; otherwise only to sampled rows.
      reads_text: whether it looks at anything but the scores. Diffusion models, whose texts have gaps, refuse it unless it
      `fills`.
      usual: whether every state has a column for it, used or not.
      removes: whether it may leave no token at all.
      reads_limit: whether it depends on where a text must end.
      forces: parameters that put one token in the place of all others, whatever other warpers leave.
      chooses: whether its scores decide which token is taken, and belong to no distribution: for greedy rows alone.
      carries: whether a state has a sum for it, of the cost of each drawn token (`cost`); it begins at 0 with the new
      text.
      walks: whether a state has one of its own for it, which every drawn token moves on (`moved`) from its `start` with the
      new text. Unlike a sum, it depends on no scores.
      aligns: how it brings texts nearer to the model's distribution given a constraint, a key of
      `specjax.constrain.kinds.DISTRIBUTIONS`; empty: not at all.
      fills: whether it also knows what may stand at the open places of a canvas (`filling`).
    """

    about: ClassVar[Named] = None
    of_logits: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    usual: ClassVar[bool] = False
    removes: ClassVar[bool] = False
    reads_limit: ClassVar[bool] = False
    forces: ClassVar[tuple[str, ...]] = ()
    chooses: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    walks: ClassVar[bool] = False
    aligns: ClassVar[str] = ""
    fills: ClassVar[bool] = False

    @property
    def switches(self) -> tuple[str, ...]:
        """The parameters that turn it on if they differ from their default."""
        return tuple(field.name for field in dataclasses.fields(self) if field.metadata["switch"])

    def used(self, own: Columns) -> Array:
        """`[B]` bool: the rows that it changes."""
        used = [_differs(own[name], getattr(self, name)) for name in self.switches]
        return jnp.stack(used).any(axis=0)

    def __call__(self, scores: Array, own: Columns, on: Array, text: Text | None) -> Array:
        """Scores `[B, T, V]` after it; removed tokens are -inf. It costs next to nothing if no row is `on`.

        Args:
          scores: `[B, T, V]` float32.
          own: its parameters.
          on: `[B]` bool, rows that use it and matter.
          text: the text before each position; None if it does not read that.
        """
        warped = lambda: jnp.where(on[:, None, None], self.warp(scores, own, text), scores)
        return jax.lax.cond(jnp.any(on), warped, lambda: scores)

    def cost(self, scores: Array, own: Columns) -> Array:
        """`[B, T, V]`: what drawing each token adds to the sum of a warper that carries one; not defined for others.

        Args:
          scores: `[B, T, V]`, before the warper.
          own: its parameters.
        """
        return jnp.zeros_like(scores)

    def start(self, own: Columns, batch: int) -> Any:
        """The states of a warper that `walks` before the first new token: an array or a tree of arrays `[B, ...]`, here int32.

        Args:
          own: its parameters.
          batch: B.
        """
        return jnp.zeros((batch,), jnp.float32 if self.carries else jnp.int32)

    def moved(self, own: Columns, states: Any, tokens: Array) -> Any:
        """The states of a warper that `walks` after one more token each; not defined for others.

        Args:
          own: its parameters.
          states: `[B, T, ...]`, see `start`.
          tokens: `[B, T]` int32, none of them negative.
        """
        return states

    def guessed(self, own: Columns, states: Any) -> Array | None:
        """`[B, T]` int32: a token that a warper that `walks` nearly leaves no choice about in each state; -1 for none.
        None if it never guesses.

        Args:
          own: its parameters.
          states: `[B, T, ...]`, see `start`.
        """
        return None

    def asks(self, own: Columns) -> Array | None:
        """`[B]` bool: the rows for which a host is asked which tokens may follow; None if no row can be one."""
        return None

    def tried(self, own: Columns, text: Text, orders: Array, again: Array, vocab: int) -> Array:
        """`[B, 2, M]` bool: which tokens a warper that `walks` leaves at the next place, of two orders in which they are
        tried.

        What is not needed may be False: of the first order, tokens after the one that follows the first that is left.
        Of the second, tokens after the first that is left and, unless the row tries `again`, all of them.

        Args:
          own: its parameters.
          text: the text before each place, without paths.
          orders: `[B, 2, M]` int32.
          again: `[B]` bool. Tokens that were refused in the first order are not tried again in the second.
          vocab: V.
        """
        left = self.warp(jnp.zeros((orders.shape[0], 1, vocab)), own, text) > -jnp.inf
        return jnp.take_along_axis(jnp.broadcast_to(left, (orders.shape[0], 2, vocab)), orders, axis=-1)

    def filling(self, own: Columns, never: tuple[int, ...]) -> Filling:
        """What it knows of canvases, made once a step; for one that `fills`.

        Args:
          own: its parameters.
          never: ids that will not be written.
        """
        raise TypeError(f"{type(self).__name__} fills no canvases")

    @abc.abstractmethod
    def warp(self, scores: Array, own: Columns, text: Any) -> Array:
        """The new scores of rows that use it; other rows may get anything."""


def chosen(where: Array, new: Any, old: Any) -> Any:
    """The leaves `[B, T, ...]` of one tree where `[B, T]` says so, and of the other elsewhere."""
    pick = lambda new, old: jnp.where(where.reshape(*where.shape, *[1] * (old.ndim - where.ndim)), new, old)
    return jax.tree.map(pick, new, old)


def marked(ids: Array, vocab: int) -> Array:
    """Which of so many tokens are among `ids` `[B, K]`, padded with -1: `[B, V]` bool."""
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros((ids.shape[0], vocab), bool).at[rows, jnp.where(ids >= 0, ids, vocab)].set(True, mode="drop")


def _differs(column: Any, default: Any) -> Array:
    """`[B]`: whether a column differs from its default; for lists, whether they hold an id."""
    if default != ():
        return column != default
    ids = next(leaf for leaf in jax.tree.leaves(column) if leaf.dtype == jnp.int32)
    return (ids >= 0).reshape(ids.shape[0], -1).any(axis=1)


class Cut(Warper):
    """A warper that removes tokens below a score: one number per position tells which tokens stay."""

    def __call__(self, scores, own, on, text):
        none = lambda: jnp.full(scores.shape[:2], -jnp.inf)
        lowest = lambda: jnp.where(on[:, None], self.lowest(scores, own, on), -jnp.inf)
        return _from(jax.lax.cond(jnp.any(on), lowest, none), scores)  # so that a branch makes no `[B, T, V]`

    def warp(self, scores, own, text):
        return _from(self.lowest(scores, own, self.used(own)), scores)

    @abc.abstractmethod
    def lowest(self, scores: Array, own: Columns, on: Array) -> Array:
        """The lowest score that stays, `[B, T]`; rows that are not `on` may have any."""


def _from(lowest: Array, scores: Array) -> Array:
    """The scores `[B, T, V]` that are at least the lowest `[B, T]`; the others become -inf."""
    # written this way, NaN stays and makes a draw fail, instead of being removed
    return jnp.where(scores < lowest[:, :, None], -jnp.inf, scores)
