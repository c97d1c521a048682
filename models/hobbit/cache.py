"""A cache of experts on a device, whose others lie in the host's memory: a pure state machine that counts what moves.

A unit is one expert of one layer, numbered `layer * X + expert`. The cache has slots for units in many bits, and others for
units in few. A visit is one token's pass through one layer. It serves the experts that the token chose, and then may fetch
those that the gates of later layers foretell.

The paper scores units by recency, frequency, use in high precision and the distance of their layer (arXiv:2411.01433). Its
constants are not known to us: the four numbers below and their equal weights are ours.

Shapes: `V` visits, `k` experts per token, `d` layers ahead, `U` units, `H` slots for many bits, `S` slots for few.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.hobbit.routing import Routing
from specjax.models.hobbit.tiers import HIGH, LOW, SKIPPED, Tiers

Array = jax.Array

COUNTS = "hits", "better", "high", "low", "ahead_high", "ahead_low", "useful", "skipped", "asked"
"""What `Counts` holds, in its order."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which unit leaves a full cache: the one of the least score. Of equal ones it is the one in the first slot.

    The score is the weighted sum of four numbers between 0 and 1. Weights of 1, 0, 0, 0 are least recently used (LRU), of 0, 1,
    0, 0 least frequently used (LFU), of 0, 0, 1, 0 least used in high precision (LHU).

    Attributes:
      recency: the weight of when the unit was used last, counted in experts that tokens chose, divided by how many they chose
        so far, those of this visit included.
      frequency: that of the number of tokens that used it, divided by the number of tokens so far.
      precision: that of the share of its uses that asked for many bits.
      distance: that of the nearness of its layer: 1 less the number of layers until it comes next, divided by all layers. It
        is 0 for the layer that is being visited.
      ahead: how many layers ahead are fetched at most. The first of them that lacks an expert is fetched, and no later one. 0:
        nothing is fetched before it is asked for.
      better: whether a unit that lies there in many bits serves a token that asks for few or for none, as published. Otherwise
        every token has exactly the precision that its gates ask for, as `Tiers` has it.
    """

    recency: float = 1.0
    frequency: float = 1.0
    precision: float = 1.0
    distance: float = 1.0
    ahead: int = 1
    better: bool = True


@dataclasses.dataclass(frozen=True)
class Shape:
    """The experts of a model.

    Attributes:
      layers: the number of layers with experts.
      count: X, of each.
      each: k.
    """

    layers: int
    count: int
    each: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residency:
    """What lies on the device, and how it was used.

    Attributes:
      high: `[H]` int32, the units in many bits; -1: the slot is empty.
      low: `[S]` int32, those in few.
      last: `[U]` int32, how many experts tokens had chosen when a unit was used last, itself included; 0: it never was.
      uses: `[U]` int32, how many tokens used it.
      high_uses: `[U]` int32, how many of them asked for many bits.
      fresh: `[2, U]` bool, whether a copy in many or few bits was fetched ahead and not used yet.
      visits: int32, how many there were.
      counts: `[9]` int32, see `Counts`.
    """

    high: Array
    low: Array
    last: Array
    uses: Array
    high_uses: Array
    fresh: Array
    visits: Array
    counts: Array

    @classmethod
    def empty(cls, units: int, high: int, low: int) -> "Residency":
        """A cache of H = `high` and S = `low` slots for U = `units`, with nothing in it."""
        none = jnp.zeros((units,), jnp.int32)
        slots = lambda count: jnp.full((count,), -1, jnp.int32)
        fresh, counts = jnp.zeros((2, units), bool), jnp.zeros((len(COUNTS),), jnp.int32)
        return cls(slots(high), slots(low), none, none, none, fresh, jnp.int32(0), counts)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often experts were found, fetched and skipped.

    Attributes:
      hits: experts that a token used and that lay on the device.
      better: of these, those that it asked for in few bits or none, and had in many.
      high: experts fetched in many bits when a token asked for them.
      low: the same in few bits.
      ahead_high: experts fetched in many bits before a token asked.
      ahead_low: the same in few bits.
      useful: how many of those fetched ahead were used before they left.
      skipped: experts that a token chose and left out.
      asked: experts that tokens chose.
    """

    hits: int
    better: int
    high: int
    low: int
    ahead_high: int
    ahead_low: int
    useful: int
    skipped: int
    asked: int

    @property
    def hit_rate(self) -> float:
        """The share of the experts that tokens used that lay on the device."""
        used = self.hits + self.high + self.low
        return self.hits / used if used else 1.0

    def moved(self, high: int, low: int) -> int:
        """The bytes that came from the host, for experts of so many bytes in many and in few bits."""
        return (self.high + self.ahead_high) * high + (self.low + self.ahead_low) * low


def scores(state: Residency, policy: Policy, layer: Array, shape: Shape) -> Array:
    """The score of every unit, `[U]` float32; see `Policy`.

    Args:
      state: its `visits` counts the one that is going on.
      policy: the weights.
      layer: of the visit.
      shape: of the model.
    """
    layers = shape.layers
    chosen = (state.visits * shape.each).astype(jnp.float32)
    tokens = -(-state.visits // layers)
    of_unit = jnp.arange(state.uses.shape[0]) // shape.count
    away = (of_unit - layer - 1) % layers + 1
    share = lambda own, whole: own.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)
    parts = (
        (policy.recency, state.last.astype(jnp.float32) / chosen),
        (policy.frequency, share(state.uses, tokens[None])),
        (policy.precision, share(state.high_uses, state.uses)),
        (policy.distance, 1 - away.astype(jnp.float32) / layers),
    )
    return functools.reduce(jnp.add, [weight * part for weight, part in parts if weight], jnp.zeros(of_unit.shape))


def _fetched(slots: Array, unit: Array, scored: Array, needed: Array) -> tuple[Array, Array]:
    """The slots with a unit in place of the least one that is not needed, and whether there was such a slot."""
    worth = jnp.where(slots < 0, -jnp.inf, scored[slots])
    kept = (slots[:, None] == needed[None]).any(axis=1) & (slots >= 0)
    worth = jnp.where(kept, jnp.inf, worth)
    at = jnp.argmin(worth)
    room = worth[at] < jnp.inf
    return slots.at[at].set(jnp.where(room, unit, slots[at])), room


def visit(
    state: Residency, layer: Array, experts: Array, tiers: Array, ahead: tuple[Array, Array], policy: Policy, shape: Shape
) -> Residency:  # fmt: skip
    """The cache after one token passed one layer.

    Args:
      state: the cache.
      layer: int32.
      experts: `[k]` int32, distinct, in the order in which they are served.
      tiers: `[k]` int32, what the token asks for.
      ahead: experts and tiers `[d, k]` that later layers' gates foretell; experts of -1 are none.
      policy: which units leave.
      shape: of the model.
    """
    state = dataclasses.replace(state, visits=state.visits + 1)
    units = layer * shape.count + experts

    def serve(state: Residency, one: tuple[Array, Array, Array]) -> tuple[Residency, None]:
        unit, tier, number = one
        in_high, in_low = (state.high == unit).any(), (state.low == unit).any()
        by_high = in_high & ((tier == HIGH) | policy.better)
        by_low = ~by_high & in_low & (tier == LOW)
        used = by_high | (tier != SKIPPED)
        missing_high, missing_low = used & ~by_high & (tier == HIGH), used & ~by_high & ~by_low & (tier == LOW)
        state, _ = _loaded(state, unit, missing_high, missing_low, units, layer, policy, shape)
        fresh = jnp.stack([state.fresh[0, unit] & by_high, state.fresh[1, unit] & by_low])
        said = (
            by_high | by_low, by_high & (tier != HIGH), missing_high, missing_low, False, False, fresh.any(), ~used, True,
        )  # fmt: skip
        more = used.astype(jnp.int32)
        return dataclasses.replace(
            state,
            last=state.last.at[unit].set(jnp.where(used, number, state.last[unit])),
            uses=state.uses.at[unit].add(more),
            high_uses=state.high_uses.at[unit].add(more * (tier == HIGH)),
            fresh=state.fresh.at[:, unit].set(state.fresh[:, unit] & ~fresh),
            counts=state.counts + jnp.stack([jnp.asarray(each, jnp.int32) for each in said]),
        ), None

    numbers = (state.visits - 1) * shape.each + 1 + jnp.arange(shape.each)
    state, _ = jax.lax.scan(serve, state, (units, tiers, numbers))
    return _foreseen(state, layer, units, ahead, policy, shape) if policy.ahead else state


def _loaded(
    state: Residency, unit: Array, high: Array, low: Array, needed: Array, layer: Array, policy: Policy, shape: Shape
) -> tuple[Residency, tuple[Array, Array]]:  # fmt: skip
    """The cache with a unit fetched in many bits, in few, or not at all, where there is room; and what was fetched."""
    scored = scores(state, policy, layer, shape)
    many, few = (_fetched(slots, unit, scored, needed) for slots in (state.high, state.low))
    done = high & many[1], low & few[1]
    gone = [jnp.where(change, own, -1) for own, change in ((state.high, done[0]), (state.low, done[1]))]
    slots = jnp.where(done[0], many[0], state.high), jnp.where(done[1], few[0], state.low)
    fresh = state.fresh
    for i in range(2):  # what left is no longer fresh
        left = jnp.where((gone[i] >= 0) & (gone[i] != slots[i]), gone[i], fresh.shape[1])
        fresh = fresh.at[i, left].set(False, mode="drop")
    return dataclasses.replace(state, high=slots[0], low=slots[1], fresh=fresh), done


def _foreseen(
    state: Residency, layer: Array, units: Array, ahead: tuple[Array, Array], policy: Policy, shape: Shape
) -> Residency:  # fmt: skip
    """The cache after the first of the next layers that lacks an expert was fetched."""
    experts, tiers = (part[: policy.ahead] for part in ahead)
    depth = len(experts)
    foretold = jnp.where(experts < 0, -1, (layer + 1 + jnp.arange(depth))[:, None] * shape.count + experts)
    held = lambda slots: (foretold[:, :, None] == slots[None, None]).any(axis=-1)
    in_high, in_low = held(state.high), held(state.low)
    lacks_high = (foretold >= 0) & (tiers == HIGH) & ~in_high
    lacks_low = (foretold >= 0) & (tiers == LOW) & ~in_low & ~(in_high & policy.better)
    lacking = (lacks_high | lacks_low).any(axis=1)
    first = jnp.argmax(lacking)  # 0 if none lacks, and then nothing is fetched
    needed = jnp.concatenate([units, foretold[first]])

    def fetch(state: Residency, one: tuple[Array, Array, Array]) -> tuple[Residency, None]:
        unit, high, low = one
        state, done = _loaded(state, unit, high, low, needed, layer, policy, shape)
        said = [False, False, False, False, *done, False, False, False]
        fresh = state.fresh.at[:, jnp.maximum(unit, 0)].set(state.fresh[:, jnp.maximum(unit, 0)] | jnp.stack(done))
        counts = state.counts + jnp.stack([jnp.asarray(each, jnp.int32) for each in said])
        return dataclasses.replace(state, fresh=fresh, counts=counts), None

    return jax.lax.scan(fetch, state, (foretold[first], lacks_high[first], lacks_low[first]))[0]


def simulated(routing: Routing, tiers: Tiers, policy: Policy, count: int, high: int, low: int) -> Counts:
    """What a cache would have found and fetched while these texts were written, one token after the other.

    Texts follow each other, and the cache stays.

    Args:
      routing: of the texts.
      tiers: what their tokens ask for.
      policy: of the cache.
      count: X.
      high: H, at least k.
      low: S, at least k.

    Raises:
      ValueError: for fewer slots, or fewer layers ahead in `routing` than in `policy`.
    """
    *_, layers, each = routing.experts.shape
    if min(high, low) < each:
        raise ValueError(
            f"a cache needs slots for the {each} experts of a token in both precisions, got {high} and {low}"
        )
    if policy.ahead > (depth := routing.ahead_experts.shape[-2]):
        raise ValueError(f"the policy fetches {policy.ahead} layers ahead, and the routing foretells {depth}")
    state = Residency.empty(layers * count, high, low)
    counts = _run(state, routing, tiers, policy, Shape(layers, count, each)).counts
    return Counts(*map(int, jax.device_get(counts)))


@functools.partial(jax.jit, static_argnames=("tiers", "policy", "shape"))
def _run(state: Residency, routing: Routing, tiers: Tiers, policy: Policy, shape: Shape) -> Residency:
    flat = lambda part, width: part.reshape(-1, *part.shape[-width:])
    experts = flat(routing.experts, 1)
    wanted = tiers.of(flat(routing.weights, 1))
    later = flat(routing.ahead_experts, 2)
    foretold = tiers.of(flat(routing.ahead_weights, 1)).reshape(later.shape)
    at = jnp.arange(experts.shape[0]) % shape.layers

    def one(state: Residency, given: Any) -> tuple[Residency, None]:
        layer, experts, tiers, *ahead = given
        return visit(state, layer, experts, tiers, (ahead[0], ahead[1]), policy, shape), None

    return jax.lax.scan(one, state, (at, experts, wanted, later, foretold))[0]
