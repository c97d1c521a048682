"""Any-subset speculative decoding: one model drafts many positions separately and verifies them together (arXiv:2504.20456).

In one pass, an any-subset model gives the distribution of every position given any set of others, with a different set
for each position. A round drafts the next positions of an order. Then it reads them all at once, each given those before
it. `specjax.diffusion.assd_drafts` has who drafts: the model itself, or counts of the known tokens.

In the shape descriptions `B` denotes rows, `L` positions, `K` drafts of a round, `V` the vocabulary, `R` inserted rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.decoder import Decoder
from specjax.diffusion.assd_drafts import AnySubset, AnySubsetDraft, Known, Round, SelfDraft, distribution
from specjax.diffusion.common import ends_at
from specjax.pretty import Pretty
from specjax.prompts import OPEN, Prompts
from specjax.sampling.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, uniform
from specjax.sampling.sampler import best
from specjax.state import Finish, Rows, Stats, finish_rows
from specjax.verify.rejection import count_accepted, residual

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssdState(Rows):
    """Rows to fill in. `tokens` are garbage at open positions; `length` counts the tokens before the first open position.

    Attributes:
      opened: `[B, L]` bool, the positions to fill in.
      rank: `[B, L]` int32, when a position becomes known: the given ones come first, then the open ones from left to
        right; those after the limit are never known.
      known: `[B]` int32, how many are known.
    """

    opened: Array
    rank: Array
    known: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssdInfo(Pretty):
    """The record of one round; the next round does not need it.

    Attributes:
      at: `[B, K + 1]` int32, the positions of the round.
      committed: `[B]` int32, how many of them became known, from the first.
    """

    at: Array
    committed: Array


@dataclasses.dataclass(frozen=True)
class Assd(Decoder[AssdState]):
    """Fills in from left to right with the model's own sequential distribution. Static and hashable: a `Decoder`
    without a cache.

    It uses a row's temperature, top-k, top-p and min-p, for both distributions.

    Attributes:
      target: the model.
      drafts: K, tokens of a round; with the model's own drafts, 1 is sequential decoding.
      rule: `coupled` draws with the position's noise, both in the draft and in the verification. The text is sequential
        decoding's, whatever K and the drafter are. `rejection` is the published rule: the same distribution, another text.
      drafter: who drafts.
      mask_id: a token that stands for an open position and is never written; -1: there is none.
    """

    about = About("assd", "drafts many positions apart, and verifies them by the same model", "arXiv:2504.20456")

    target: AnySubset
    drafts: int = 5
    rule: Literal["coupled", "rejection"] = "coupled"
    drafter: AnySubsetDraft = SelfDraft()
    mask_id: int = -1

    def __post_init__(self):
        if self.drafts < 1 or self.rule not in ("coupled", "rejection"):
            raise ValueError(f"assd needs drafts >= 1 and a rule of coupled, rejection, got {self}")

    @property
    def fills_in(self) -> bool:
        return True

    def axes(self, state: AssdState) -> AssdState:
        """See `Decoder.axes`."""
        return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)

    def empty(
        self, params: PyTree, batch: int, capacity: int, cache_dtype: Any = None, eos_width: int = 1
    ) -> AssdState:
        """See `Decoder.empty`; there is no cache."""
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        own = {"opened": zeros(capacity) > 0, "rank": zeros(capacity), "known": zeros()}
        return AssdState.blank(batch, capacity, self.drafts + 1, eos_width, **own)

    def prefill(self, params: PyTree, state: AssdState, prompts: Prompts) -> AssdState:
        """See `Decoder.prefill`: open positions of a prompt are filled in, and so are the positions up to the limit."""
        (count, size), capacity = prompts.tokens.shape, state.tokens.shape[1]
        at, size = jnp.arange(capacity)[None], min(size, capacity)
        tokens = jnp.pad(prompts.tokens[:, :size], ((0, 0), (0, capacity - size)))
        limit = jnp.clip(prompts.limit, prompts.lengths, capacity)
        given = (at < prompts.lengths[:, None]) & (tokens != OPEN) & (tokens != self.mask_id)
        opened = ~given & (at < limit[:, None])
        known = given.sum(axis=1, dtype=jnp.int32)
        behind = jnp.where(opened, known[:, None] + jnp.cumsum(opened, axis=1), at + 1)
        first = jnp.min(jnp.where(opened, at, limit[:, None]), axis=1).astype(jnp.int32)
        return dataclasses.replace(
            self.empty(params, count, capacity, None, state.eos.shape[1]),
            tokens=jnp.where(given, tokens, 0),
            length=first,
            finish=jnp.where(first < limit, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            key=prompts.keys,
            prompt_length=first,
            limit=limit.astype(jnp.int32),
            eos=prompts.ends(state.eos.shape[1]),
            sampling=prompts.sampling,
            opened=opened,
            rank=(jnp.where(given, jnp.cumsum(given, axis=1), behind) - 1).astype(jnp.int32),
            known=known,
        )

    def step(self, params: PyTree, state: AssdState) -> tuple[AssdState, AssdInfo]:
        """One round: every live row fills in at least one position, or two if two are open and the model drafts at least 2."""
        live, left = ~state.done, state.limit - state.known
        order = jnp.argsort(state.rank, axis=1)
        ranks = state.known[:, None] + jnp.arange(self.drafts + 1)[None]  # the drafts, and the position after them
        at = jnp.take_along_axis(order, jnp.minimum(ranks, order.shape[1] - 1), axis=1)
        real = ranks < state.limit[:, None]
        noise = gumbel(state.key, at, self.target.vocab_size, GUMBEL)
        noise = jnp.where((state.sampling.temperature > 0)[:, None, None], noise, 0)

        before = self._before(state)
        seen = Known(state.tokens, before, state.rank < state.known[:, None])
        dist = lambda tokens, sees, at: distribution(
            self.target, params["target"], tokens, sees, at, state.sampling, live, self.mask_id
        )
        drafted, q = self.drafter(Round(dist, seen, at[:, :-1], noise[:, :-1]))
        padded = jnp.pad(drafted, ((0, 0), (0, 1)))

        def verify():
            filled = _write(state.tokens, at[:, :-1], drafted, real[:, :-1])
            p = dist(filled, before, at)
            judge = self._coupled if self.rule == "coupled" else self._rejection
            there = real[:, :-1] & (drafted >= 0)
            accepted, token = judge(p, q, drafted, there, noise, at, state.key)
            slots = jnp.arange(self.drafts + 1)[None]
            return jnp.where(slots == accepted[:, None], token[:, None], padded), accepted + 1

        # a sure draft that is alone needs no second look
        alone = self.drafter.sure & ((left == 1) | (self.drafts == 1))
        none = (padded, jnp.ones_like(left))
        new, count = jax.lax.cond(jnp.any(live & ~alone), verify, lambda: none)
        new = jnp.where(alone[:, None], padded, new)
        count = jnp.where(live, jnp.minimum(jnp.where(alone, 1, count), left), 0)
        failed = live & (jnp.take_along_axis(new, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0] < 0)
        count = (count - failed).astype(jnp.int32)
        passes = jnp.where(live, self.drafter.passes + jnp.where(alone, 0, 1), 0)
        return self._commit(state, order, at, new, count, passes, failed), AssdInfo(at, count)

    def _before(self, state) -> Array:
        """Which positions j each position i sees `[B, L, L]` once all before it are known; given positions see all given ones.

        A known token sees the same in the draft, in the verification and in every later round. So what a network
        computes for it stays the same, and so do the distributions of later tokens.
        """
        given = ~state.opened & (jnp.arange(state.opened.shape[1])[None] < state.limit[:, None])
        reach = jnp.where(given, given.sum(axis=1, keepdims=True), state.rank)
        return state.rank[:, None, :] < reach[:, :, None]

    def _commit(self, state, order, at, new, count, passes, failed) -> AssdState:
        """The state with the first `count` `[B]` of the tokens `new` at the positions `at`, both `[B, K + 1]`."""
        slots = jnp.arange(at.shape[1])[None]
        tokens = _write(state.tokens, at, new, slots < count[:, None])
        known = state.known + count
        following = jnp.take_along_axis(order, jnp.minimum(known, order.shape[1] - 1)[:, None], axis=1)[:, 0]
        length = jnp.where(known < state.limit, following, state.limit)
        length = jnp.where(state.done, state.length, length).astype(jnp.int32)
        end = ends_at(tokens, state.opened, length, state.eos)
        ended = ~state.done & (end < length)
        counted = (~state.done[:, None]) & (jnp.arange(state.stats.accepted.shape[1])[None] == count[:, None])
        return dataclasses.replace(
            state,
            tokens=tokens,
            length=jnp.where(ended, end + 1, length),
            finish=finish_rows(state, length, ended, failed),
            stats=Stats(state.stats.steps + passes, state.stats.accepted + counted),
            known=known,
        )

    def _coupled(self, p, q, drafted, real, noise, at, keys):
        """How many drafts are kept `[B]`, and the token after them `[B]`; `real` `[B, K]` says which drafts there are."""
        own = best(p + noise)
        same = (own[:, :-1] == drafted) & real
        accepted = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1)
        return accepted, jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]

    def _rejection(self, p, q, drafted, real, noise, at, keys):
        p, q = jnp.exp(p), jnp.exp(q)
        accepted = count_accepted(p[:, :-1], q, drafted, uniform(keys, at[:, :-1], ACCEPT), real)
        weights = residual(p, q, real, accepted)
        here = jnp.take_along_axis(at, accepted[:, None], axis=1)
        fresh = gumbel(keys, here, self.target.vocab_size, RESIDUAL)[:, 0]
        return accepted, best(jnp.where(weights > 0, jnp.log(weights), -jnp.inf) + fresh)


def _write(tokens, at, new, where):
    """Rows `[B, L]` with `new` at the positions `at`, `[B, K]` each, for those that are asked for."""
    slots = jnp.where(where, at, tokens.shape[1])
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(tokens, slots, new)
