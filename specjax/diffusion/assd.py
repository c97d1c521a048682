"""Any-subset speculative decoding: one model drafts many positions apart and verifies them together (arXiv:2504.20456).

An any-subset model gives the law of every position given any set of others, each position's set its own, in one pass. A round
drafts the next positions of an order from the known tokens alone, then reads them all at once, each given those before it. The
first draft's two laws are one, so it always holds, and a round of two passes brings two tokens at least.

In the shape descriptions `B` denotes rows, `L` positions, `K` drafts of a round, `V` the vocabulary.
"""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from specjax.sampling.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, uniform
from specjax.sampling.sampler import best
from specjax.verify.rejection import count_accepted, residual

Array = jax.Array
PyTree = Any


class AnySubset(Protocol):
    """A model of the law of every position given any others. Hashable."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, params: PyTree, tokens: Array, sees: Array, at: Array) -> Array:
        """Logits `[B, K, V]` of the positions `at` `[B, K]`, each position i from the tokens j of `[B, L]` for which
        `sees[b, i, j]` `[B, L, L]`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssdState:
    """Rows to fill in.

    Attributes:
      tokens: `[B, L]` int32; garbage at open positions.
      rank: `[B, L]` int32, when a position becomes known: the given ones come first, the others from left to right.
      known: `[B]` int32, how many are.
      key: `[B]` typed keys.
      passes: `[B]` int32.
    """

    tokens: Array
    rank: Array
    known: Array
    key: Array
    passes: Array


@dataclasses.dataclass(frozen=True)
class Assd:
    """Fills in from left to right with the model's own sequential law. Static and hashable; its functions are pure.

    Attributes:
      target: the model.
      drafts: K, tokens of a round; 1 is sequential decoding.
      rule: `coupled` draws with noise of the position, in the draft as in the verification: the text is that of sequential
        decoding, whatever K is. `rejection` is the published rule: the same law, another text.
      temperature: of both laws.
    """

    target: AnySubset
    drafts: int = 5
    rule: Literal["coupled", "rejection"] = "coupled"
    temperature: float = 1.0

    def __post_init__(self):
        if self.drafts < 1 or self.rule not in ("coupled", "rejection") or not self.temperature > 0:
            raise ValueError(f"assd needs drafts >= 1, a rule of coupled, rejection and temperature > 0, got {self}")

    def init(self, tokens: Array, given: Array, row_keys: Array) -> AssdState:
        """Rows `[B, L]` of which the positions `given` `[B, L]` are known."""
        known = given.sum(axis=1, dtype=jnp.int32)
        rank = jnp.where(given, jnp.cumsum(given, axis=1), known[:, None] + jnp.cumsum(~given, axis=1)) - 1
        return AssdState(tokens, rank.astype(jnp.int32), known, row_keys, jnp.zeros_like(known))

    def step(self, params: PyTree, state: AssdState) -> AssdState:
        """One round: every unfinished row fills in one position at least, two where two are open and K is at least 2."""
        length = state.tokens.shape[1]
        ranks = state.known[:, None] + jnp.arange(self.drafts + 1)[None]  # the drafts, and the one behind them
        at = jnp.take_along_axis(jnp.argsort(state.rank, axis=1), jnp.minimum(ranks, length - 1), axis=1)
        real = ranks < length
        noise = gumbel(state.key, at, self.target.vocab_size, GUMBEL)

        apart = jnp.broadcast_to(
            (state.rank < state.known[:, None])[:, None], (*state.rank.shape, length)
        )  # every position sees what is known
        q = self._laws(params, state.tokens, apart, at[:, :-1])
        drafted = best(q + noise[:, :-1])
        left = length - state.known

        def verify():
            filled = _write(state.tokens, at[:, :-1], drafted, real[:, :-1])
            before = state.rank[:, None, :] < state.rank[:, :, None]
            p = self._laws(params, filled, before, at)
            judge = self._coupled if self.rule == "coupled" else self._rejection
            accepted, token = judge(p, q, drafted, real, noise, at, state.key)
            slots = jnp.arange(self.drafts + 1)[None]
            padded = jnp.pad(drafted, ((0, 0), (0, 1)))
            return jnp.where(slots == accepted[:, None], token[:, None], padded), accepted + 1

        # a single position needs no second look, nor does a single draft
        alone = (left == 1) | (self.drafts == 1)
        none = (jnp.pad(drafted, ((0, 0), (0, 1))), jnp.ones_like(left))
        new, count = jax.lax.cond(jnp.any((left > 0) & ~alone), verify, lambda: none)
        new = jnp.where(alone[:, None], none[0], new)
        count = jnp.minimum(jnp.where(alone, 1, count), left)
        live = left > 0
        wanted = live[:, None] & (jnp.arange(self.drafts + 1)[None] < count[:, None])
        return dataclasses.replace(
            state,
            tokens=_write(state.tokens, at, new, wanted & real),
            known=state.known + jnp.where(live, count, 0),
            passes=state.passes + jnp.where(live, jnp.where(alone, 1, 2), 0),
        )

    def run(self, params: PyTree, state: AssdState) -> AssdState:
        """Rounds until every position of every row is known."""
        length = state.tokens.shape[1]
        return jax.lax.while_loop(lambda s: jnp.any(s.known < length), lambda s: self.step(params, s), state)

    def _laws(self, params, tokens, sees, at):
        return jax.nn.log_softmax(self.target(params, tokens, sees, at) / self.temperature, axis=-1)

    def _coupled(self, p, q, drafted, real, noise, at, keys):
        own = best(p + noise)
        same = (own[:, :-1] == drafted) & real[:, :-1]
        accepted = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1)
        return accepted, jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]

    def _rejection(self, p, q, drafted, real, noise, at, keys):
        p, q = jnp.exp(p), jnp.exp(q)
        accepted = count_accepted(p[:, :-1], q, drafted, uniform(keys, at[:, :-1], ACCEPT), real[:, :-1])
        weights = residual(p, q, real[:, :-1], accepted)
        here = jnp.take_along_axis(at, accepted[:, None], axis=1)
        fresh = gumbel(keys, here, self.target.vocab_size, RESIDUAL)[:, 0]
        return accepted, best(jnp.where(weights > 0, jnp.log(weights), -jnp.inf) + fresh)


def _write(tokens, at, new, where):
    """Rows `[B, L]` with `new` at the positions `at`, `[B, K]` each, where asked."""
    slots = jnp.where(where, at, tokens.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, slots, new)
