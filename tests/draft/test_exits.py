"""Exits of a draft model: where each token leaves, against whole passes over plain texts; what is queued, and what runs."""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET, params

from specjax.draft import S2D, View
from specjax.expand import Chain
from specjax.expand.base import Expander, Level
from specjax.lm import Block, Wants
from specjax.models import LlamaLM
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.tree import Topology, Tree

EXITS = (1, 2, 3)
HEATS = 0.0, 0.5, 1.0, 0.0
CHAIN = Chain(2)
RAN = collections.Counter()


class Counted(LlamaLM):
    """Counts how often layers from each one on are run."""

    def layers(self, params, h, lo, hi, *args, **kwargs):
        jax.debug.callback(lambda lo=lo: RAN.update([lo]))
        return super().layers(params, h, lo, hi, *args, **kwargs)


def drafter_of(thresholds=(0.5, 0.6), expander=CHAIN):
    """The queue holds 7 tokens, and a step commits up to 3."""
    return S2D(Counted(TARGET.config), expander, EXITS, thresholds, 7)


def weights():
    """A draft model of three layers, which differs from the target in the last."""
    target = params()["target"]
    last = jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, target["layers"][2])
    return {**target, "layers": {**target["layers"], 2: last}}


@dataclasses.dataclass(frozen=True)
class TwoLevels(Expander):
    """Two nodes below the root and one below each; `log_q` has the drafter's raw logits."""

    nodes, depth = 5, 2

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        two = jax.lax.top_k(logits, 2)[1].astype(jnp.int32)
        none = jnp.full_like(two, -1)
        more = grow(carry, Level(two, none, jnp.broadcast_to(jnp.eye(2, dtype=bool), (len(two), 2, 2)), 1))[1]
        last = jnp.argmax(more, axis=2).astype(jnp.int32)
        tokens = jnp.concatenate([root[:, None], two, last], axis=1)
        raw = jnp.concatenate([logits[:, None], more, more], axis=1)
        return Tree.of(Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0)), tokens, tokens >= 0, log_q=raw)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Four rows before a step; the last one ends early."""

    tokens: np.ndarray
    length: np.ndarray
    live: np.ndarray
    draft: Any

    @property
    def rows(self):
        return np.flatnonzero(self.live)

    def view(self):
        given = jnp.asarray(self.tokens), jnp.asarray(self.length), jnp.asarray(self.live)
        return View(*given, (), max_depth=2, keep_q=True)


@functools.partial(jax.jit, static_argnums=0)
def proposed(drafter, draft, view):
    sampling = SamplingArrays.make(4, temperature=HEATS)
    sampler = Sampler(row_keys(0, "abcd"), view.tokens, view.length, view.live, sampling)
    return drafter.propose({"draft": weights()}, draft, view, sampler)


def propose(drafter, moment):
    """The next proposal, as for a verifier that reads distributions."""
    return proposed(drafter, moment.draft, moment.view())


@jax.jit
def whole_pass(tokens):
    """Logits `[X, B, T, V]` at every exit, keys and values by layer, and the first exit's stream, without a cache."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    block = Block(tokens, at, jnp.zeros(len(tokens), jnp.int32))
    draft = weights()
    out = TARGET(draft, block, None, wants=Wants(hidden=tuple(n - 1 for n in EXITS)))
    logits = jnp.stack([TARGET.unembed(draft, TARGET.norm(draft, out.hidden[n - 1])) for n in EXITS])
    return logits, out.delta.key, out.delta.value, out.hidden[0]


@pytest.fixture(scope="module")
def states():
    """Moments of random texts, of which every step commits one to three tokens."""
    rng = np.random.default_rng(4)
    tokens, length = rng.integers(0, 96, (4, 24)).astype(np.int32), np.array([1, 3, 2, 2], np.int32)
    draft, live, found = drafter_of().init({"draft": weights()}, 4, 32), np.ones(4, bool), []
    for number in range(7):
        found.append(Moment(tokens, length, live, draft))
        draft = propose(drafter_of(), found[-1]).draft
        live = np.array([True, True, True, number < 4])
        length = length + np.where(live, rng.integers(1, 4, 4), 0).astype(np.int32)
    return found


def leaving(logits, thresholds):
    """The first of the exits `[X, B, ...]` at which a row is sure, from its logits `[X, B, F, V]`."""
    bounds = np.array([*thresholds, *thresholds[:1] * (2 - len(thresholds)), -1.0])
    return (np.asarray(jax.nn.softmax(logits)).max(axis=(2, 3)) > bounds[:, None]).argmax(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("thresholds", [(0.5, 0.6), (1.0,), (0.0,)])
def test_every_token_leaves_at_the_first_exit_that_is_sure(states, thresholds):
    """By whole passes over the text and the drafted tokens, also what each was drawn from. Thresholds of 1 are the plain
    draft model, and of 0 its first exit."""
    left = collections.Counter()
    for state in states[:-1]:
        tree = propose(drafter_of(thresholds), state).tree
        texts, size = np.array(state.tokens), state.length
        drafted, q = np.asarray(tree.tokens)[:, 1:], np.exp(np.asarray(tree.log_q))
        texts[np.arange(4)[:, None], size[:, None] + np.arange(2)] = drafted
        logits = np.asarray(whole_pass(jnp.asarray(texts))[0])
        for row in state.rows:
            for depth in range(2):
                here = logits[:, row, size[row] - 1 + depth]
                exit = leaving(here[:, None, None], thresholds)[0]
                left[int(exit)] += 1
                if HEATS[row] == 0:
                    assert drafted[row, depth] == here[exit].argmax()
                else:
                    np.testing.assert_allclose(q[row, depth], jax.nn.softmax(here[exit] / HEATS[row]), atol=1e-4)
    assert set(left) == {(0.5, 0.6): {0, 1, 2}, (1.0,): {2}, (0.0,): {0}}[thresholds]


@pytest.mark.slow
def test_a_frontier_shares_one_exit(states):
    seen = set()
    for state in states[:-1]:
        tree = propose(drafter_of(expander=TwoLevels()), state).tree
        size, rows = state.length, state.rows
        both = []
        for child in (1, 2):
            texts = np.array(state.tokens)
            texts[np.arange(4), size] = np.asarray(tree.tokens)[:, child]
            both.append(np.asarray(whole_pass(jnp.asarray(texts))[0])[:, np.arange(4), size])
        both = np.stack(both, axis=2)
        exits = leaving(both, (0.5, 0.6))
        alone = [leaving(both[:, :, i : i + 1], (0.5, 0.6)) for i in (0, 1)]
        seen |= {(int(exits[row]), *(int(one[row]) for one in alone)) for row in rows}
        for row in rows:
            np.testing.assert_allclose(tree.log_q[row, 1:3], both[exits[row], row], rtol=1e-3, atol=1e-3)
    assert any(shared < max(own) for shared, *own in seen), "a frontier never left before one of its nodes would have"


@pytest.mark.slow
def test_the_cache_and_the_queue_are_those_of_a_fresh_prefill(states):
    """After every step, where nothing needed deeper layers, and again when a threshold of 1 has flushed the queue."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    waited, waiting = 0, states[0].draft
    for before, state in itertools.pairwise(states):
        _, keys, values, h = whole_pass(jnp.asarray(state.tokens))
        waiting = propose(drafter_of((0.0,)), dataclasses.replace(before, draft=waiting)).draft
        flushed = propose(drafter_of((1.0,)), dataclasses.replace(state, draft=waiting)).draft
        for draft, text in ((state.draft, before), (waiting, before), (flushed, state)):
            assert ((draft.length + draft.count) == text.length)[text.rows].all()
            for row in text.rows:
                size, count = int(draft.length[row]), int(draft.count[row])
                for kept, new in zip((*draft.cache.key, *draft.cache.value), (*keys, *values), strict=True):
                    close(np.asarray(kept)[row, :, :size].swapaxes(0, 1), new[row, :size])
                close(draft.h[row, :count], h[row, size : size + count])
                close(draft.delta.key[0][row, :count], keys[0][row, size : size + count])
        assert not flushed.count.any()
        waited += int(waiting.count.sum())
    assert waited, "nothing was ever queued"


@pytest.mark.slow
def test_deeper_layers_run_only_where_they_are_needed(states):
    """Where no row is unsure, they do not run, unless the queue could overflow in the next step."""
    found, draft = [], states[0].draft
    for state in states:
        RAN.clear()
        before, draft = draft, propose(drafter_of((0.0,)), dataclasses.replace(state, draft=draft)).draft
        jax.block_until_ready(draft)
        jax.effects_barrier()
        full = bool((state.length - np.asarray(before.length) > 7 - 3)[state.rows].any())
        assert RAN == ({0: 2, 1: 1, 2: 1} if full else {0: 2})
        found.append(full)
    assert 0 < sum(found) < len(found) / 2


@pytest.mark.slow
def test_it_catches_up_after_steps_that_left_it_out(states):
    """And a step must not commit more than the queue holds."""
    drafter, late, state = drafter_of(), states[1].draft, states[5]
    assert (state.length - np.asarray(late.length))[state.rows].max() > 6
    draft = jax.jit(drafter.catch_up)({"draft": weights()}, late, state.view())
    ours, wanted = (propose(drafter, dataclasses.replace(state, draft=d)).tree for d in (draft, state.draft))
    assert (ours.tokens == wanted.tokens)[state.rows].all()
    with pytest.raises(ValueError, match="commits up to 9 tokens and the queue holds 7: choose queue=9 or more"):
        drafter.propose({"draft": weights()}, late, dataclasses.replace(state.view(), max_depth=8), None)
