"""The cache of experts against plain Python, by each of its four numbers and by all; bytes, and what is fetched ahead."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_target as small

from specjax.lm import Block, Wants
from specjax.models.hobbit.cache import Counts, Policy, simulated
from specjax.models.hobbit.routing import Routing, of_texts
from specjax.models.hobbit.tiers import Tiers, unimportance

LAYERS, EXPERTS, EACH, TOKENS = 3, 6, 3, 60
WHOLE, SOME = Tiers(1, 1), Tiers(0.45, 0.8)


def drawn(seed, skew=1.0):
    """Random routing: experts of unequal popularity, and foretold ones that are right about half the time."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(EXPERTS, skew), LAYERS) + 0.01
    popular /= popular.sum(axis=1, keepdims=True)
    pick = lambda layer: rng.choice(EXPERTS, EACH, replace=False, p=popular[layer])
    experts = np.asarray([[pick(layer) for layer in range(LAYERS)] for _ in range(TOKENS)])
    gates = np.sort(rng.dirichlet(np.ones(EACH), (TOKENS, LAYERS)), axis=-1)[..., ::-1]
    depth = 2
    later, gates_later = np.full((TOKENS, LAYERS, depth, EACH), -1), np.zeros((TOKENS, LAYERS, depth, EACH))
    for t in range(TOKENS):
        for layer in range(LAYERS):
            for j in range(min(depth, LAYERS - 1 - layer)):
                right = rng.uniform() < 0.5
                later[t, layer, j] = experts[t, layer + 1 + j] if right else pick(layer + 1 + j)
                gates_later[t, layer, j] = gates[t, layer + 1 + j]
    return Routing(*(jnp.asarray(x[None], kind) for x, kind in
                     ((gates, jnp.float32), (experts, jnp.int32), (gates_later, jnp.float32), (later, jnp.int32))))  # fmt: skip


class PlainCache:
    """The rules of `specjax.models.hobbit.cache`, with lists and dictionaries, one unit at a time."""

    def __init__(self, policy, tiers, high, low):
        self.policy, self.tiers = policy, tiers
        self.slots = {0: [None] * high, 1: [None] * low}
        self.last, self.uses, self.high_uses = (collections.Counter() for _ in range(3))
        self.fresh, self.visits, self.counts = set(), 0, collections.Counter()

    def score(self, unit, layer):
        p, uses = self.policy, self.uses[unit]
        tokens = (self.visits + LAYERS - 1) // LAYERS
        away = next(n for n in range(1, LAYERS + 1) if (layer + n) % LAYERS == unit[0])
        return (
            p.recency * self.last[unit] / (EACH * self.visits) + p.frequency * uses / tokens
            + p.precision * (self.high_uses[unit] / uses if uses else 0) + p.distance * (1 - away / LAYERS)
        )  # fmt: skip

    def fetch(self, which, unit, needed, layer):
        slots = self.slots[which]
        free = [i for i, own in enumerate(slots) if own is None]
        may = free or [i for i, own in enumerate(slots) if own not in needed]
        if not may:
            return False
        at = free[0] if free else min(may, key=lambda i: (round(self.score(slots[i], layer), 6), i))
        self.fresh.discard((which, slots[at]))
        slots[at] = unit
        return True

    def visit(self, layer, experts, wants, later):
        self.visits += 1
        needed = [(layer, e) for e in experts]
        for unit, want in zip(needed, wants, strict=True):
            self.counts["asked"] += 1
            now = self.counts["asked"]
            in_high, in_low = unit in self.slots[0], unit in self.slots[1]
            if in_high and (want == 0 or self.policy.better):
                source = 0
            elif want == 2:
                self.counts["skipped"] += 1
                continue
            elif want == 1 and in_low:
                source = 1
            else:
                source = None
                self.counts["high" if want == 0 else "low"] += 1
                self.fetch(want, unit, needed, layer)
            if source is not None:
                self.counts["hits"] += 1
                self.counts["better"] += source == 0 and want != 0
                if (source, unit) in self.fresh:
                    self.fresh.discard((source, unit))
                    self.counts["useful"] += 1
            self.last[unit], self.uses[unit] = now, self.uses[unit] + 1
            self.high_uses[unit] += want == 0
        for j, (experts, wants) in enumerate(later[: self.policy.ahead]):
            units = [(layer + 1 + j, e) for e in experts]
            lacks = [
                want
                if (want == 0 and unit not in self.slots[0])
                or (want == 1 and unit not in self.slots[1] and not (self.policy.better and unit in self.slots[0]))
                else None
                for unit, want in zip(units, wants, strict=True)
            ]
            if any(want is not None for want in lacks):
                for unit, want in zip(units, lacks, strict=True):
                    if want is not None and self.fetch(want, unit, needed + units, layer):
                        self.counts["ahead_high" if want == 0 else "ahead_low"] += 1
                        self.fresh.add((want, unit))
                return


def by_hand(routing, tiers, policy, high, low):
    """The counts of `PlainCache` over the routing."""
    cache = PlainCache(policy, tiers, high, low)
    of = lambda weights: [tiers.of(jnp.asarray(weights)[None])[0].tolist()][0]
    wanted = np.asarray(tiers.of(routing.weights.reshape(-1, EACH))).reshape(TOKENS, LAYERS, EACH)
    foretold = np.asarray(tiers.of(routing.ahead_weights.reshape(-1, EACH))).reshape(TOKENS, LAYERS, -1, EACH)
    assert of(routing.weights[0, 0, 0]) == wanted[0, 0].tolist()
    experts, later = np.asarray(routing.experts[0]), np.asarray(routing.ahead_experts[0])
    for t in range(TOKENS):
        for layer in range(LAYERS):
            ahead = [
                (own.tolist(), want.tolist())
                for own, want in zip(later[t, layer], foretold[t, layer], strict=True)
                if own[0] >= 0
            ]
            cache.visit(layer, experts[t, layer].tolist(), wanted[t, layer].tolist(), ahead)
    names = [field.name for field in dataclasses.fields(Counts)]
    return Counts(**{name: cache.counts[name] for name in names})


POLICIES = {
    "lru": Policy(1, 0, 0, 0, ahead=0),
    "lfu": Policy(0, 1, 0, 0, ahead=0),
    "lhu": Policy(0, 0, 1, 0, ahead=0),
    "distance": Policy(0, 0, 0, 1, ahead=1),
    "all": Policy(1, 0.71, 0.53, 0.37, ahead=2),
    "exact": Policy(0.9, 0.71, 0.53, 0.37, ahead=1, better=False),
}


@pytest.mark.parametrize("name", [*POLICIES])
def test_counts_are_those_of_plain_python(name):
    routing = drawn(len(name))
    counts = simulated(routing, SOME, POLICIES[name], EXPERTS, 7, 4)
    assert counts == by_hand(routing, SOME, POLICIES[name], 7, 4)
    assert counts.high and counts.low and counts.hits and (counts.skipped or POLICIES[name].better)
    assert bool(counts.ahead_high + counts.ahead_low) == bool(POLICIES[name].ahead)
    assert bool(counts.better) == POLICIES[name].better


def test_least_recently_used_by_an_ordered_dictionary():
    """Whole experts alone, by the usual few lines."""
    routing, held, misses = drawn(4, skew=0.3), collections.OrderedDict(), 0
    for t in range(TOKENS):
        for layer in range(LAYERS):
            units = [(layer, int(e)) for e in routing.experts[0, t, layer]]
            for unit in units:
                if unit not in held:
                    misses += 1
                    if len(held) == 8:
                        held.pop(next(own for own in held if own not in units))
                held[unit] = True
                held.move_to_end(unit)
    counts = simulated(routing, WHOLE, POLICIES["lru"], EXPERTS, 8, EACH)
    assert (counts.high, counts.low, counts.skipped) == (misses, 0, 0)
    assert counts.hits + counts.high == counts.asked == TOKENS * LAYERS * EACH
    assert counts.moved(10**12, 10**11) == misses * 10**12
    room = simulated(routing, WHOLE, POLICIES["lru"], EXPERTS, LAYERS * EXPERTS, EACH)
    used = {(layer, int(e)) for t in range(TOKENS) for layer in range(LAYERS) for e in routing.experts[0, t, layer]}
    assert room.high == len(used), "a cache with room for all fetches each expert once"


def test_what_is_fetched_ahead_is_not_fetched_again():
    """With true foresight all but the first layer of a token is there when it is asked for, and no more is moved."""
    routing = drawn(2)
    right = jnp.concatenate([routing.experts[:, :, 1:], jnp.full_like(routing.experts[:, :, :1], -1)], axis=2)
    weights = jnp.concatenate([routing.weights[:, :, 1:], jnp.zeros_like(routing.weights[:, :, :1])], axis=2)
    sure = dataclasses.replace(routing, ahead_experts=right[:, :, :, None], ahead_weights=weights[:, :, :, None])
    counts = simulated(sure, WHOLE, Policy(1, 0, 0, 0, ahead=1), EXPERTS, 7, EACH)
    first = simulated(sure, WHOLE, Policy(1, 0, 0, 0, ahead=0), EXPERTS, 7, EACH)
    assert counts.useful == counts.ahead_high > 0 and counts.high < first.high / 2
    assert counts.high + counts.ahead_high <= first.high + EACH


def test_routing_of_a_model():
    """The experts that its layers take, read from what their routers read; a layer ahead by the next one's router."""
    lm = small.with_experts()
    params, tokens = small.weights(lm), jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    routing = jax.jit(lambda params: of_texts(lm, params, tokens, 2))(params)
    assert routing.experts.shape == (2, 5, 2, 2) and routing.ahead_experts.shape == (2, 5, 2, 2, 2)
    np.testing.assert_array_equal(routing.ahead_experts[:, :, 1], -1)
    np.testing.assert_array_equal(routing.ahead_experts[:, :, 0, 1], -1)
    assert 0 <= float(routing.foretold) <= 1 and np.allclose(routing.weights.sum(axis=-1), 1, atol=1e-6)
    # a router whose columns are swapped chooses the swapped experts of its own layer, and is foretold to
    swapped = jax.tree.map(lambda x: x, params)
    router = swapped["layers"][1]["mlp"]["router"]
    router["kernel"] = router["kernel"][:, ::-1]
    other = jax.jit(lambda params: of_texts(lm, params, tokens, 2))(swapped)
    np.testing.assert_array_equal(other.experts[:, :, 0], routing.experts[:, :, 0])
    np.testing.assert_array_equal(other.experts[:, :, 1], 3 - routing.experts[:, :, 1])
    np.testing.assert_array_equal(other.ahead_experts[:, :, 0, 0], 3 - routing.ahead_experts[:, :, 0, 0])
    # an expert that the routing does not name has no part in the text
    unused = set(range(4)) - set(np.asarray(routing.experts[0, :, 0]).ravel().tolist())
    assert (unimportance(routing.weights.reshape(-1, 2))[:, 0] == 0).all()
    block = Block(tokens[:1], jnp.arange(5)[None], jnp.zeros(1, jnp.int32), None, causal=True)
    own = jax.tree.map(lambda x: x, params)
    for i in unused:
        down = own["layers"][0]["mlp"]["experts"]["down"]
        down["kernel"] = down["kernel"].at[i].set(jnp.nan)
    assert jnp.isfinite(lm(own, block, None, wants=Wants(logits=True)).logits).all()


def test_what_is_refused():
    routing = drawn(0)
    with pytest.raises(ValueError, match="slots for the 3 experts of a token in both precisions, got 7 and 2"):
        simulated(routing, SOME, Policy(), EXPERTS, 7, 2)
    with pytest.raises(ValueError, match="fetches 3 layers ahead, and the routing foretells 2"):
        simulated(routing, SOME, Policy(ahead=3), EXPERTS, 7, 4)
    lm = small.with_experts()
    with pytest.raises(ValueError, match="foretold for at least one layer, got 0"):
        of_texts(lm, small.weights(lm), jnp.asarray([[1]]), 0)
    with pytest.raises(ValueError, match="layers have experts of one kind in place of an MLP"):
        of_texts(small.TARGET, small.weights(small.TARGET), jnp.asarray([[1]]))
