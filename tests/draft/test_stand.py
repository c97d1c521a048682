"""STAND: what the memory holds after a step, how a node finds its distribution, and what drafting with the shared noise
gains."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.draft import Chunk, Stand, TokenRecycling, Verdict, View, fuse
from specjax.draft.stand import average
from specjax.lm import Block, Output
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import stand as oracle
from specjax.reference import statistics
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.sampling.noise import gumbel
from specjax.verify import Rejection

V, K, B, L = 12, 4, 3, 16
DRAFTER = Stand(tree="3 | 2 1 1 | 1x2", k=K)  # so many slots that the few contexts below do not collide
LENGTHS = (1, 2, 9)
propose = jax.jit(lambda drafter, memory, view, sampler: drafter.propose({}, memory, view, sampler), static_argnums=0)
observe = jax.jit(lambda drafter, *args: drafter.observe({}, *args), static_argnums=0)
learned = jax.jit(lambda drafter, *args: drafter._learn(*args), static_argnums=0)
recalled = jax.jit(lambda drafter, *args: drafter._recall(*args), static_argnums=0)


def world(rng, temperature=0.0, vocab=V):
    """A view of three rows, two of them shorter than the longest context, and their sampler."""
    tokens = jnp.asarray(rng.integers(0, vocab, (B, L)), jnp.int32)
    view = View(tokens, jnp.asarray(LENGTHS), jnp.ones(B, bool), (), max_depth=DRAFTER.depth)
    return view, Sampler(
        row_keys(0, "abc"), tokens, view.length, view.live, SamplingArrays.make(B, temperature=temperature)
    )


def texts(view):
    return [np.asarray(view.tokens)[row, :length].tolist() for row, length in enumerate(LENGTHS)]


def keys_of(contexts):
    return jnp.asarray([[-1] * (3 - len(c)) + list(c) for c in contexts], jnp.int32)


def held(memory):
    """The memory as the oracle's dictionary."""
    keys, ids, probs, seen = (np.asarray(x) for x in (memory.keys, memory.ids, memory.probs, memory.seen))
    return {
        tuple(t for t in keys[slot].tolist() if t >= 0): (
            int(seen[slot]), {int(i): float(p) for i, p in zip(ids[slot], probs[slot], strict=True) if i >= 0}
        ) for slot in np.flatnonzero(seen)
    }  # fmt: skip


def same_memory(got, want):
    assert got.keys() == want.keys()
    for context, (count, dist) in want.items():
        assert got[context][0] == count, context
        assert got[context][1] == pytest.approx(dist, abs=1e-6), context


def filled(rng, contexts, steps=3):
    """A memory that has seen random distributions after `contexts`, and the oracle's."""
    memory, want = DRAFTER.init({}, B, L), {}
    for _ in range(steps):
        logits = rng.normal(size=(len(contexts), V)) * 2
        values, ids = jax.lax.top_k(jnp.asarray(logits, jnp.float32), K)
        known = jnp.ones(len(contexts), bool)
        memory = learned(DRAFTER, memory, keys_of(contexts), known, ids, jax.nn.softmax(values))
        dists = [oracle.distribution_of(row, K) for row in logits]
        want = oracle.learn(want, list(zip(contexts, dists, strict=True)), K)
    return memory, want


def some_contexts(rng, count=60, vocab=4):
    return [tuple(rng.integers(0, vocab, rng.integers(1, 4)).tolist()) for _ in range(count)]


@pytest.mark.parametrize("times", [1, 2, 7, 50])
def test_the_average_of_equal_distributions_is_that_distribution(times):
    dist = jnp.asarray([[0.5, 0.3, 0.15, 0.05]])
    ids, probs = jnp.full((1, K), -1), jnp.zeros((1, K))
    for count in range(times):
        ids, probs = average(ids, probs, jnp.asarray([count]), jnp.asarray([[7, 2, 9, 0]]), dist)
    assert ids.tolist() == [[7, 2, 9, 0]]
    np.testing.assert_allclose(probs, dist, rtol=1e-5)


dists = st.dictionaries(st.integers(0, 8), st.floats(0.01, 1.0), min_size=1, max_size=K)


@settings(max_examples=50, deadline=None)
@given(dists, dists, st.integers(0, 5))
def test_an_average_is_over_the_union_and_keeps_the_likeliest(old, new, count):
    pad = lambda dist: (
        jnp.asarray([[*dist, *[-1] * (K - len(dist))]], jnp.int32),
        jnp.asarray([[*dist.values(), *[0.0] * (K - len(dist))]], jnp.float32),
    )
    old = dict(sorted(old.items(), key=lambda entry: -entry[1]))
    ids, probs = (np.asarray(x)[0].tolist() for x in average(*pad(old), jnp.asarray([count]), *pad(new)))
    full = oracle.average(old if count else {}, count, new, 2 * K)
    got = {i: p for i, p in zip(ids, probs, strict=True) if i >= 0}
    assert len(got) == min(K, len(full))
    assert probs == pytest.approx([*sorted(full.values(), reverse=True), *[0.0] * K][:K], abs=1e-6)
    assert all(full[i] == pytest.approx(p, abs=1e-6) for i, p in got.items())


def test_learning_step_by_step_equals_the_dictionary():
    """60 contexts of which many repeat within a step."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        contexts = some_contexts(rng)
        assert len(set(contexts)) < 55
        memory, want = filled(rng, contexts)
        same_memory(held(memory), want)


@pytest.mark.parametrize("temperature", [0.0, 0.7, [1.0, 0.0, 2.0]])
def test_a_node_takes_its_longest_known_context_and_the_shared_noise(temperature):
    topology = DRAFTER.topology
    seen_lengths = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        memory, dists = filled(rng, some_contexts(rng, 30, 3))
        view, sampler = world(rng, temperature, vocab=3)
        noise = np.asarray(gumbel(sampler.key, view.length[:, None] + jnp.arange(DRAFTER.depth)[None], V))
        tree = propose(DRAFTER, memory, view, sampler).tree
        for row, text in enumerate(texts(view)):
            own = float(sampler.params.temperature[row])
            want = oracle.tree(dists, text, topology.parents, topology.ranks, noise[row], own)
            assert tree.tokens[row].tolist() == want
            assert tree.valid[row].tolist() == [token >= 0 for token in want]
            seen_lengths.add(next((len(c) for c in oracle.contexts(text) if c in dists), 0))
    assert {1, 2, 3} <= seen_lengths


def test_a_prompt_read_in_chunks_is_learned_as_certain():
    """Row by row and chunk by chunk: what followed every context of the real tokens, alone likely; -1 is no context."""
    prefill = jax.jit(lambda memory, chunk: DRAFTER.prefill({}, memory, chunk, None))
    rng = np.random.default_rng(0)
    tokens, lengths, width = rng.integers(0, 6, (B, L)), (1, 6, 14), 5
    memory, want = DRAFTER.init({}, B, L), {}
    for start in range(0, 15, width):
        columns = start + np.arange(width)
        real = columns[None] < np.asarray(lengths)[:, None] - 1
        block = Block(jnp.asarray(tokens[:, columns]), jnp.broadcast_to(columns[None], (B, width)), jnp.full(B, start))
        memory = prefill(memory, Chunk(block, jnp.asarray(real), jnp.asarray(tokens[:, columns + 1])))
        dists = [
            (context, {int(tokens[row, at + 1]): 1.0})
            for row in range(B) for at in columns if at < lengths[row] - 1
            for context in oracle.contexts(tokens[row, : at + 1].tolist())
        ]  # fmt: skip
        want = oracle.learn(want, dists, K)
    assert {len(context) for context in want} == {1, 2, 3}
    same_memory(held(memory), want)


def test_an_empty_memory_proposes_nothing():
    view, sampler = world(np.random.default_rng(0), 1.0)
    tree = propose(DRAFTER, DRAFTER.init({}, B, L), view, sampler).tree
    assert tree.valid.sum(axis=1).tolist() == [1] * B and (tree.tokens[:, 1:] == -1).all()


def stepped(rng, memory, paths, committed):
    """One step over random trees and logits; the rows' texts, trees and top-k's come back beside the memory."""
    view, sampler = world(rng)
    proposal = propose(DRAFTER, memory, view, sampler)
    logits = rng.normal(size=(B, DRAFTER.nodes + 2, V)).astype(np.float32)  # two extra slots: never looked at
    tokens = jnp.asarray(rng.integers(0, V, (B, DRAFTER.nodes)), jnp.int32).at[:, 0].set(view.root)
    tree = dataclasses.replace(proposal.tree, tokens=tokens)
    proposal = dataclasses.replace(proposal, tree=tree)
    output = Output(delta=(), topk=jax.lax.top_k(jnp.asarray(logits), K + 2))  # another drafter wants more
    accepted = jnp.asarray([sum(node >= 0 for node in path) - 1 for path in paths])
    verdict = Verdict(jnp.asarray(paths), accepted, jnp.zeros(B, int), jnp.asarray(committed))
    after = observe(DRAFTER, proposal.draft, proposal, output, verdict)
    return view, np.asarray(tokens), logits, after


@pytest.mark.parametrize("committed", [[4, 3, 1], [0, 2, 0], [1, 1, 1], [0, 0, 0]])
def test_a_step_teaches_the_distributions_that_decided_its_tokens(committed):
    """The distribution after a path's node counts under that node's contexts, if the token it decided was committed."""
    paths = [[0, 1, 4, 8], [0, 2, 6, -1], [0, -1, -1, -1]]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        memory, want = filled(rng, some_contexts(rng, 20, V))
        view, tokens, logits, after = stepped(rng, memory, paths, committed)
        updates = []
        for row, text in enumerate(texts(view)):
            for turn, node in enumerate(paths[row][: committed[row]]):
                line = [*text, *tokens[row][paths[row][1 : turn + 1]].tolist()]
                dist = oracle.distribution_of(logits[row, node], K)
                updates += [(context, dist) for context in oracle.contexts(line)]
        same_memory(held(after), oracle.learn(want, updates, K))


def test_broken_logits_teach_nothing():
    memory = DRAFTER.init({}, B, L)
    proposal = propose(DRAFTER, memory, *world(np.random.default_rng(0)))
    topk = (jnp.full((B, DRAFTER.nodes, K), jnp.nan), jnp.zeros((B, DRAFTER.nodes, K), int))
    verdict = Verdict(jnp.zeros((B, 4), int), jnp.zeros(B, int), jnp.zeros(B, int), jnp.ones(B, int))
    assert held(observe(DRAFTER, proposal.draft, proposal, Output(delta=(), topk=topk), verdict)) == {}


@pytest.mark.parametrize(("slots", "probes"), [(1, 1), (3, 2), (8, 4)])
def test_contexts_that_collide_are_told_apart(slots, probes):
    """Tables far too small: whatever is found was learnt after that very context, and the table never holds one twice."""
    drafter = Stand(tree="1", k=2, slots=slots, probes=probes)
    memory = drafter.init({}, 1, L)
    rng = np.random.default_rng(0)
    name = lambda context: hash(context) % 1000
    kept = 0
    for _ in range(30):
        contexts = some_contexts(rng, 5)
        ids = jnp.asarray([[name(c), 2000 + len(c)] for c in contexts], jnp.int32)
        dists = jnp.full((5, 2), 0.5)
        memory = learned(drafter, memory, keys_of(contexts), jnp.ones(5, bool), ids, dists)
        stored = held(memory)
        assert len(stored) == int((memory.seen > 0).sum()) <= slots
        assert all(set(dist) == {name(c), 2000 + len(c)} for c, (_, dist) in stored.items())
        asked = some_contexts(rng, 20)
        last = jnp.asarray([[[-1] * (3 - len(c)) + list(c) for c in asked]], jnp.int32)
        got, probs = (np.asarray(x)[0] for x in recalled(drafter, memory, last))
        for context, own, mass in zip(asked, got, probs, strict=True):
            match = next((c for c in oracle.contexts(context) if c in stored), None)
            assert mass.any() == (match is not None)
            if match is not None:
                assert set(own.tolist()) == set(stored[match][1])
                kept += 1
    assert kept > 50


def test_the_least_seen_context_gives_way():
    drafter = Stand(tree="1", k=2, slots=2, probes=2)
    memory = drafter.init({}, 1, L)
    teach = lambda memory, token: learned(
        drafter, memory, keys_of([(token,)]), jnp.ones(1, bool), jnp.asarray([[token, 0]]), jnp.full((1, 2), 0.5)
    )
    for token in (5, 5, 5, 6):
        memory = teach(memory, token)
    assert set(held(memory)) == {(5,), (6,)}
    assert set(held(teach(memory, 7))) == {(5,), (7,)}


@functools.partial(jax.jit, static_argnums=0)
def begin(decoder, params, tokens, keys, limit, sampling):
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1])
    return decoder.init(params, Prompts(tokens, lengths, keys, limit, sampling), capacity=56)


def decode(lm, params, drafter, temperature, memory=None, rows=4, length=48):
    decoder = specjax.speculative(lm, drafter)
    keys = row_keys(0, [str(i) for i in range(rows)])
    sampling = SamplingArrays.make(rows, temperature=temperature)
    state = begin(decoder, params, jnp.asarray([[1, 2]] * rows), keys, jnp.full(rows, length), sampling)
    if memory is not None:
        state = dataclasses.replace(state, draft=dataclasses.replace(memory, tail=state.draft.tail))
    state = specjax.run(decoder, params, state)
    return np.asarray(state.tokens)[:, :length], np.asarray(state.stats.steps), state.draft


CHAIN = Stand(tree="1 | 1 | 1", k=V, slots=1 << 12)


@pytest.mark.slow
def test_a_memory_of_the_target_accepts_nearly_everything_at_temperature_one():
    """After the target's own distributions, `log q + g` with the shared noise is the target's draw: 4 tokens per step,
    of 4."""
    lm = TabularLM(V, order=1)
    params = {"target": random(jax.random.key(0), V, 1), "draft": None}
    text, cold, memory = decode(lm, params, CHAIN, 1.0)
    again, warm, _ = decode(lm, params, CHAIN, 1.0, memory)
    np.testing.assert_array_equal(text, again)
    assert (warm <= 13).all()  # 46 tokens; a context that was never met, or its last steps, may cost one
    assert warm.sum() < cold.sum() < 2 * warm.sum()  # a cold memory fills soon


@pytest.mark.slow
def test_the_memory_changes_speed_and_never_text():
    lm = TabularLM(V, order=2)
    params = {"target": random(jax.random.key(1), V, 2, concentration=0.2), "draft": None}
    drafter = dataclasses.replace(DRAFTER, slots=64)
    temperature = jnp.asarray([0.0, 1.0, 0.5, 2.0])
    rng = np.random.default_rng(0)
    poison = dataclasses.replace(
        drafter.init({}, 4, L),
        keys=jnp.asarray(rng.integers(-1, V, (64, 3)), jnp.int32),
        ids=jnp.asarray(rng.integers(-1, V, (64, K)), jnp.int32),
        probs=jnp.asarray(rng.random((64, K)), jnp.float32),
        seen=jnp.asarray(rng.integers(0, 9, 64), jnp.int32),
    )
    cold, steps, memory = decode(lm, params, drafter, temperature)
    warm, fewer, _ = decode(lm, params, drafter, temperature, memory)
    poisoned, _, _ = decode(lm, params, drafter, temperature, poison)
    np.testing.assert_array_equal(warm, cold)
    np.testing.assert_array_equal(poisoned, cold)
    assert fewer.sum() < steps.sum() < 4 * 46


@pytest.mark.slow
def test_rejection_with_its_distribution_keeps_the_targets_distribution_detects_tv_003_with_power_099():
    """A chain from a memory of other distributions, some cut to few tokens; 20,000 rows a temperature, the first two
    new tokens."""
    each, vocab, temperatures = 20_000, 5, (1.0, 0.6)
    assert statistics.power(each, vocab, 0.03, 1e-3) > 0.99
    rows = each * len(temperatures)
    lm = TabularLM(vocab, order=1)
    params = {"target": random(jax.random.key(3), vocab, 1), "draft": None}
    drafter = Stand(tree="1 | 1", k=vocab, slots=1 << 12)
    with pytest.raises(
        ValueError, match="rows draft on their own"
    ):  # the memory is of all rows: the distribution stays, a row's text not
        specjax.speculative(lm, drafter, Rejection())
    decoder = dataclasses.replace(specjax.speculative(lm, drafter), verifier=Rejection())
    sampling = SamplingArrays.make(rows, temperature=np.repeat(temperatures, each))
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
    state = begin(decoder, params, jnp.full((rows, 2), 1), keys, jnp.full(rows, 20), sampling)
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((vocab, vocab)) < 0.3, 0, rng.random((vocab, vocab)))
    values, ids = jax.lax.top_k(jnp.asarray(weights / weights.sum(1, keepdims=True), jnp.float32), vocab)
    contexts = [(token,) for token in range(vocab)]
    memory = learned(
        decoder.drafter, state.draft, keys_of(contexts), jnp.ones(vocab, bool), jnp.where(values > 0, ids, -1), values
    )
    _, info = jax.jit(decoder.step)(params, dataclasses.replace(state, draft=memory))
    accepted = np.asarray(info.verdict.accepted).reshape(len(temperatures), each)
    new = np.asarray(info.verdict.emitted).reshape(len(temperatures), each, -1)
    for turn, temperature in enumerate(temperatures):
        table = {"table": params["target"]["table"] / temperature}
        dist = np.exp(lm.next_log_probs(table, np.arange(vocab)[:, None]))
        first = np.bincount(new[turn, :, 0], minlength=vocab)
        assert statistics.chi_square(first, dist[1]) > 1e-3 > statistics.chi_square(first, dist[2])
        two = new[turn][accepted[turn] >= 1]  # what follows an accepted token
        assert len(two) > each // 3
        for token in np.unique(two[:, 0]):
            after = np.bincount(two[two[:, 0] == token, 1], minlength=vocab)
            assert statistics.chi_square(after, dist[token]) > 1e-3, token


@pytest.mark.slow
def test_rows_of_one_prompt_help_each_other():
    """Four completions of one prompt take fewer steps together than the four of them alone."""
    lm = TabularLM(V, order=1)
    params = {"target": random(jax.random.key(2), V, 1, concentration=0.3), "draft": None}
    _, together, _ = decode(lm, params, CHAIN, 1.0)
    _, alone, _ = decode(lm, params, CHAIN, 1.0, rows=1)
    assert together[0] < alone[0]


@pytest.mark.slow
def test_it_fuses_with_a_drafter_that_keeps_fewer_candidates():
    lm = TabularLM(V, order=1)
    params = {"target": random(jax.random.key(0), V, 1), "draft": None}
    both = fuse(CHAIN, TokenRecycling(k=3, tree="2 | 1"))
    assert both.wants.topk == V
    np.testing.assert_array_equal(decode(lm, params, both, 1.0)[0], decode(lm, params, CHAIN, 1.0)[0])


def test_shapes_and_bad_input():
    assert DRAFTER.nodes == 10 and DRAFTER.depth == 3 and DRAFTER.rungs[-1] == 10
    with pytest.raises(ValueError, match="rank"):
        Stand(tree="3", k=2)
    with pytest.raises(ValueError, match="probes"):
        Stand(slots=2, probes=4)
    with pytest.raises(ValueError, match="vocabulary"):
        Stand(k=10).bind(TabularLM(4))
