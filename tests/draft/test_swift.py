"""SWIFT: what skipping means, the search for what to skip, and that it ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import ALIKE, MIXED, PREFIX, TARGET, complete, params, same, start
from support.head_start import bindings, check_head_start, proposed, running, step

import specjax
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft import NoDrafter, Swift, skip_search
from specjax.lm import Block
from specjax.models.tabular import TabularLM, random

DRAFTER = Swift(length=2, threshold=0.0, share=0.5, window=8, patience=9, trials=3, guess_every=2, history=4)
NEW = dataclasses.replace(MIXED, options=({"temperature": 0.0}, {"temperature": 1.0}) * 4).pick(1, 4, 2, 7)


@pytest.fixture(scope="module")
def midway():
    return running(DRAFTER, params("swift"), steps=8, rows=NEW)


def block_of(tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return Block(tokens, positions, jnp.zeros(len(tokens), jnp.int32))


def test_a_skipped_sublayer_adds_nothing():
    """As if its last matrix were zero; nothing skipped is the plain stack, bit for bit."""
    weights = params("swift")["target"]
    block = block_of(jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]))
    h = TARGET.embed(weights, block.tokens)
    run = jax.jit(lambda weights, skip=None: TARGET.layers(weights, h, 0, 3, block, None, None, skip))
    plain, delta = run(weights)
    same, own = run(weights, jnp.zeros((3, 2), bool))
    np.testing.assert_array_equal(same, plain)
    jax.tree.map(np.testing.assert_array_equal, own, delta)
    for sublayer, path in ((0, ("attention", "o")), (1, ("mlp", "down"))):
        silent = jax.tree.map(lambda x: x, weights)
        silent["layers"][1][path[0]][path[1]]["kernel"] *= 0
        got, holes = run(weights, jnp.zeros((3, 2), bool).at[1, sublayer].set(True))
        np.testing.assert_allclose(got, run(silent)[0], rtol=1e-6)
        assert not np.allclose(got, plain) and (np.asarray(holes.key[1]) == 0).all() == (sublayer == 0)


def test_a_skip_set_of_a_one_layer_model():
    lm, block = TabularLM(5, order=2), block_of(jnp.asarray([[3, 1, 4]]))
    weights = random(jax.random.key(0), 5, 2)
    h = lm.embed(weights, block.tokens)
    for skipped in (False, True):
        got, _ = lm.layers(weights, h, 0, 1, block, None, None, jnp.full((1, 2), skipped))
        wanted = h if skipped else lm.layers(weights, h, 0, 1, block, None)[0]
        np.testing.assert_array_equal(got, wanted)


def test_skipped_work_is_under_scalar_branches():
    """A layer is two branches, and no product lies outside of them."""
    weights = params("swift")["target"]
    block = block_of(jnp.asarray([[3, 1, 4, 1, 5]]))
    h = TARGET.embed(weights, block.tokens)
    run = lambda skip: TARGET.layers(weights, h, 1, 2, block, None, None, skip)
    eqns = jax.make_jaxpr(run)(jnp.zeros((3, 2), bool)).jaxpr.eqns
    branches = [e for e in eqns if e.primitive.name == "cond"]
    assert len(branches) == 2 and all(e.invars[0].aval.shape == () for e in branches)
    assert not any(e.primitive.name == "dot_general" for e in eqns)


@pytest.mark.slow
def test_a_finished_search_costs_nothing(midway):
    """The trial's own products, over its window, are under one branch of the step."""
    decoder, state = midway
    eqns = jax.make_jaxpr(decoder.drafter.propose)(params("swift"), state.draft, *bindings(decoder, state)).jaxpr.eqns
    window = (4, DRAFTER.window, 96)  # logits of the trial
    makes = lambda jaxpr: any(v.aval.shape == window for e in jaxpr.eqns for v in e.outvars)
    assert not any(v.aval.shape == window for e in eqns for v in e.outvars)
    trials = [e for e in eqns if e.primitive.name == "cond" and any(makes(b.jaxpr) for b in e.params["branches"])]
    assert len(trials) == 1 and [makes(b.jaxpr) for b in trials[0].params["branches"]] == [False, True]


@pytest.mark.slow
def test_nothing_skipped_is_always_right():
    """At temperature 0 every token of the draft is then accepted."""
    greedy = dataclasses.replace(NEW, options=({"temperature": 0.0},) * 4)
    _, state = running(dataclasses.replace(DRAFTER, share=0.0), params("swift"), steps=4, rows=greedy)
    assert state.stats.accepted.tolist() == [[0, 0, 4]] * 4 and state.draft.trials[0] == 0


@pytest.mark.slow
def test_the_target_goes_on_above_the_first_layer(midway):
    check_head_start(midway[0], params("swift"), midway[1], lo=1)


@pytest.mark.slow
def test_siblings_are_leaves_of_the_chain(midway):
    tree = proposed(midway[0], params("swift"), midway[1]).tree
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1] and tree.valid.all()
    assert (tree.tokens[:, 1::2] != tree.tokens[:, 2::2]).all()


def test_the_search_stops(midway):
    decoder, state = midway
    assert state.draft.trials[0] == DRAFTER.trials
    after = step(decoder, params("swift"), state)
    jax.tree.map(np.testing.assert_array_equal, after.draft, state.draft)
    assert state.draft.score[0] == state.draft.scores[:3].max() > 0


def test_matchness_of_the_whole_model_is_one(midway):
    """Nothing skipped: it would have drawn every token that decoding drew, greedy or sampled; skipped, fewer."""
    decoder, state = midway
    view, sampler = bindings(decoder, state)
    assert (state.length - state.prompt_length >= 8).all()
    score = jax.jit(lambda skip, live: decoder.drafter.matchness(
        params("swift"), skip, dataclasses.replace(view, live=live), sampler, state.prompt_length))  # fmt: skip
    assert score(jnp.zeros((3, 2), bool), view.live) == 1.0
    middle = jnp.zeros((3, 2), bool).at[1].set(True)
    each = [float(score(middle, jnp.arange(4) == row)) for row in range(4)]
    assert 0 < np.mean(each) < 1 and float(score(middle, view.live)) == pytest.approx(np.mean(each))
    assert score(middle, jnp.zeros(4, bool)) == 0.0


def test_a_published_trial_looks_at_the_first_generated_tokens(midway):
    """As many as are in the window, whatever came later; and prompts are counted as they are read."""
    decoder, state = midway
    assert state.draft.prompt.tolist() == state.prompt_length.tolist()
    view, sampler = bindings(decoder, state)
    drafter = dataclasses.replace(decoder.drafter, first=True, window=5)
    score = jax.jit(lambda tokens: drafter.matchness(
        params("swift"), jnp.zeros((3, 2), bool), dataclasses.replace(view, tokens=tokens), sampler,
        state.prompt_length))  # fmt: skip
    place = jnp.arange(view.tokens.shape[1])[None] - state.prompt_length[:, None]
    other = (view.tokens + 1) % 96
    assert score(view.tokens) == score(jnp.where(place > 5, other, view.tokens)) == 1.0
    assert score(jnp.where(place == 5, other, view.tokens)) == pytest.approx(4 / 5)


@pytest.mark.slow
def test_rows_with_little_text_wait(midway):
    decoder, state = midway
    fresh = dataclasses.replace(state, draft=decoder.drafter.init(params("swift"), 4, 0))
    assert proposed(decoder, params("swift"), fresh).draft.trials[0] == 1
    short = dataclasses.replace(fresh, length=jnp.minimum(fresh.length, DRAFTER.window))
    assert proposed(decoder, params("swift"), short).draft.trials[0] == 0


def search_run(trials, size, matchness, layers=8, guess_every=5):
    run = jax.jit(lambda s: skip_search.advance(s, matchness, size, guess_every))
    state = skip_search.start(layers, 16)
    out = []
    for _ in range(trials):
        state = run(state)
        out.append(state)
    return out


WORTH = jnp.asarray(np.random.default_rng(0).normal(size=12), jnp.float32)


@functools.cache
def searched():
    return search_run(60, 5, lambda chosen: jnp.where(chosen, WORTH, 0.0).sum())


def test_the_search_keeps_the_best_set():
    states = searched()
    assert states[0].best.tolist() == [True, True, False, False] * 3  # every odd layer first
    scores = [float(s.score[0]) for s in states]
    assert scores == sorted(scores) and scores[-1] > scores[0]
    for before, after in zip(states, states[1:], strict=False):
        tried = np.asarray(after.tried[(int(after.trials[0]) - 1) % 16])
        assert tried.sum() == 5
        better = np.where(tried, WORTH, 0).sum() > float(before.score[0])
        assert (after.idle[0] == 0) == better == (not (after.best == before.best).all())
    assert float(np.where(states[-1].best, WORTH, 0).sum()) == pytest.approx(scores[-1])
    assert len({tuple(np.asarray(s.tried[0]).tolist()) for s in states[::16]}) == 4  # not the same sets again


def test_guesses_are_better_than_random_sets():
    states = searched()
    tried = [float(s.scores[(i % 16)]) for i, s in enumerate(states)]
    guessed = [x for i, x in enumerate(tried) if i % 5 == 4][2:]
    others = [x for i, x in enumerate(tried) if i % 5 != 4][1:]
    assert np.mean(guessed) > np.mean(others) + np.std(others)


def test_the_bound_is_a_gaussian_processs():
    rng = np.random.default_rng(1)
    tried, sets = rng.random((6, 8)) < 0.5, rng.random((5, 8)) < 0.5
    scores = rng.normal(size=6)
    near = lambda a, b: np.exp(-(a[:, None] != b[None]).sum(axis=2) / 6.0)
    y = (scores[:4] - scores[:4].mean()) / scores[:4].std()
    inverse = np.linalg.inv(near(tried[:4], tried[:4]) + skip_search.NOISE * np.eye(4))
    across = near(sets, tried[:4])
    wanted = across @ inverse @ y + skip_search.KAPPA * np.sqrt(1 - np.diag(across @ inverse @ across.T))
    got = skip_search.bound(jnp.asarray(sets), jnp.asarray(tried), jnp.asarray(scores), jnp.arange(6) < 4, 3)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("layers", (3, 4, 8))
def test_the_first_and_the_last_layer_are_never_skipped(layers):
    among = 2 * (layers - 2)
    for size in range(1, among + 1):
        for chosen in skip_search.random_sets(jax.random.key(size), 4, size, among):
            skip = np.asarray(skip_search.mask(chosen))
            assert skip.shape == (layers, 2) and skip.sum() == size and not skip[[0, -1]].any()
    assert not np.asarray(skip_search.mask(skip_search.start(layers, 4).best))[[0, -1]].any()
    assert skip_search.sublayers(8, 0.45) == 5 and skip_search.sublayers(3, 0.45) == 0


def test_bad_fields():
    with pytest.raises(ValueError, match="between the first and the last"):
        specjax.speculative(TabularLM(8), Swift())
    with pytest.raises(ValueError, match="share"):
        Swift(share=1.5)
    with pytest.raises(ValueError, match="width=97"):
        Swift(width=97).bind(TARGET)


@pytest.mark.slow
def test_rows_of_a_shared_prefix_count_their_whole_prompts():
    """The leaf that is each row's own is copied with the prefix, and what every row's rest adds comes on top."""
    decoder, rows = specjax.speculative(TARGET, DRAFTER), ALIKE.pick(0, 1, 3)
    lengths = [len(prompt) for prompt in rows.prompts]
    for prefix in (0, PREFIX):
        state = start(decoder, rows, model=params("swift"), prefix=prefix, width=8)
        np.testing.assert_array_equal(state.draft.prompt, lengths)


DROPS = ((False, False), (True, False), (False, True))
"""Of three layers; the last one may lose a part too."""


GIVEN = Swift(length=2, threshold=0.0, skipped=DROPS)


@pytest.mark.slow
def test_with_a_given_list_the_text_stays_and_nothing_is_searched():
    """Greedy rows beside sampled ones, each alone in its proposals."""
    found, state = complete(GIVEN, model=params("swift"))
    same(found, complete(NoDrafter(), model=params("swift"))[0])
    assert GIVEN.alone and GIVEN.looks_back == 0 and state.draft.trials[0] == 0


@pytest.mark.slow
def test_a_given_list_is_what_the_draft_leaves_out():
    decoder, state = running(GIVEN, params("swift"), steps=1, rows=NEW)
    view, _ = bindings(decoder, state)
    weights, block = params("swift")["target"], Block(view.root[:, None], view.length[:, None] - 1, view.length - 1)

    def first(skip):
        h = TARGET.embed(weights, block.tokens)
        h, _ = TARGET.layers(weights, h, 0, 3, block, view.cache, None, skip)
        return jnp.argmax(TARGET.unembed(weights, TARGET.norm(weights, h))[:, 0], axis=-1)

    tree = proposed(decoder, params("swift"), state).tree
    greedy = np.asarray(state.sampling.temperature) == 0
    np.testing.assert_array_equal(tree.tokens[greedy, 1], jax.jit(first)(jnp.asarray(DROPS))[greedy])
    assert (jax.jit(first)(jnp.zeros((3, 2), bool))[greedy] != tree.tokens[greedy, 1]).any()


def test_a_list_of_another_model_or_without_the_first_layer_is_refused(tmp_path):
    for skipped, said in (
        (DROPS[:2], "has 2 lines, one per layer, and the target has 3 layers"),
        (DROPS[::-1], "leaves out a part of the first layer"),
    ):
        with pytest.raises(ValueError, match=said):
            Swift(skipped=skipped).bind(TARGET)
    file = tmp_path / "drops.txt"
    file.write_text("none\nattn\nmlp\n")
    model = dataclasses.replace(specjax.load("tiny-draft"), lm=TARGET)
    loaded = parse("drafter", DRAFTERS, f"swift:length=3,layers={file}").load(model)[0]
    assert loaded.skipped == DROPS and loaded.length == 3
    with pytest.raises(ValueError, match=r"leaves nothing to search: leave out window, trials"):
        parse("drafter", DRAFTERS, f"swift:trials=9,window=7,layers={file}").load(model)
    with pytest.raises(ValueError, match=r"leaves nothing to search: leave out trials"):
        Swift(skipped=DROPS, trials=9)
    with pytest.raises(ValueError, match="there is no list of sublayers at"):
        parse("drafter", DRAFTERS, "swift:layers=nowhere").load(model)
