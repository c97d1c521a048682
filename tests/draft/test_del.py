"""DEL: the choice of exit and length, the evidence for it, and that no layer is read twice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, TARGET, but_slow, params
from support.head_start import bindings, check_head_start, count_products, poisoned, proposed, running
from support.shapes import changed

import specjax
from specjax.draft import DynamicExit, Verdict
from specjax.draft.del_ import Evidence, Pending, tokens_per_layer
from specjax.models.tabular import TabularLM

DRAFTER = DynamicExit(exits=(1, 2), length=3)
EXITS = DRAFTER.exits


@pytest.fixture(scope="module")
def midway():
    return running(DRAFTER, params("del"))


def evidence(rates, sure=None, unsure=None):
    """Ten positions seen at every exit; by default the confidences set no threshold."""
    matched = 10 * jnp.asarray(rates, jnp.float32)
    seen = jnp.full_like(matched, 10.0)
    zero = jnp.zeros_like(matched)
    return Evidence(matched, seen, zero if sure is None else sure, zero if unsure is None else unsure)


def favouring(state, choice):
    """The state with evidence that makes every row vote for one exit."""
    rates = [[0.0, 1.0]] * 4 if choice else [[1.0, 0.0]] * 4
    return dataclasses.replace(state, draft=evidence(rates))


def test_the_promise_is_tokens_over_layers():
    rates = np.random.default_rng(0).random((2, 3))
    got = tokens_per_layer(jnp.asarray(rates), (2, 4, 7), 5, 16)
    assert got.shape == (2, 3, 5)
    for row in range(2):
        for i, layers in enumerate((2, 4, 7)):
            for d in range(1, 6):
                wanted = sum(rates[row, i] ** j for j in range(d + 1)) / (d * layers + 16)
                assert got[row, i, d - 1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("rate", "drafted"), [(1.0, 5), (0.0, 1)])
def test_certain_exits(rate, drafted):
    """Always right: the lowest exit and the longest chain. Always wrong: the shortest."""
    promise = np.asarray(tokens_per_layer(jnp.full((1, 3), rate), (2, 4, 7), 5, 16))[0]
    exit_, length = np.unravel_index(promise.argmax(), promise.shape)
    assert (exit_, length + 1) == (0, drafted)
    np.testing.assert_allclose(promise[2, 1], (1 + rate + rate**2) / (2 * 7 + 16), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def said(decoder, state, tree, h):
    """What an exit draws at every node of a full pass, and how sure it is."""
    weights = params("del")["target"]
    _, sampler = bindings(decoder, state)
    logits = TARGET.unembed(weights, TARGET.norm(weights, h))
    scores = sampler.scores(logits, tree.depth, tree.path_tokens, tree.max_depth)
    return scores.argmax(axis=2), jax.nn.softmax(scores).max(axis=2)


@pytest.mark.slow
@pytest.mark.parametrize("choice", but_slow((0, 1), 0))
def test_the_target_goes_on_above_the_last_exit(midway, choice):
    """Whichever exit drafted; and what each exit would have drawn is what a full pass says it draws."""
    decoder, state = midway
    state = favouring(state, choice)
    proposal, full = check_head_start(decoder, params("del"), state, lo=2)
    tree = proposal.tree
    valid = np.asarray(tree.valid)
    for i, layers in enumerate(EXITS):
        wanted, sure = map(np.asarray, said(decoder, state, tree, full.hidden[layers - 1]))
        shadow = np.asarray(proposal.draft.shadow[:, i])
        asked = shadow >= 0
        if i == choice:  # the node of the last drafted token was not asked
            assert (asked == np.roll(np.where(np.arange(4) > 0, valid, False), -1, axis=1)).all()
            assert (np.where(asked, shadow, -1)[:, :-1] == np.asarray(tree.tokens[:, 1:])).all()
        else:
            assert asked.all()
        at = asked & valid
        assert at.any() and (shadow[at] == wanted[at]).all()
        np.testing.assert_allclose(np.asarray(proposal.draft.confidence[:, i])[at], sure[at], rtol=1e-4)


@pytest.mark.slow
def test_a_low_exit_reads_no_higher_layer_to_draft(midway):
    decoder, state = midway
    state = favouring(state, 0)
    wanted = proposed(decoder, params("del"), state).tree.tokens
    np.testing.assert_array_equal(proposed(decoder, poisoned(params("del"), [1, 2]), state).tree.tokens, wanted)


@pytest.mark.slow
def test_every_layer_is_read_once(midway):
    """MLP inputs, two per layer: below each exit one pass per node, from there to the last exit one, above it one per
    rung."""
    decoder, state = midway
    jaxpr = jax.make_jaxpr(decoder.step)(params("del"), state).jaxpr
    shape = CONFIG.hidden_size, CONFIG.dense.intermediate_size
    first, second = 1 * DRAFTER.nodes + 1, 2 * DRAFTER.nodes
    assert count_products(jaxpr, shape) == 2 * (first + second + 1 * len(DRAFTER.rungs))


@pytest.mark.slow
def test_live_rows_vote_and_rows_choose_their_length(midway):
    """Two rows for either exit, of which one is finished; then lengths and thresholds at the exit that won."""
    decoder, state = midway
    rates = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.9, 0.0]]
    state = dataclasses.replace(state, draft=evidence(rates))
    for dead, choice in (((1, 2), 0), ((0, 3), 1)):
        finish = jnp.zeros(4, jnp.int32).at[jnp.asarray(dead)].set(1)
        tree_and_rest = proposed(decoder, params("del"), dataclasses.replace(state, finish=finish))
        asked = (np.asarray(tree_and_rest.draft.shadow) >= 0).all(axis=2)
        assert asked[:, 1 - choice].all() and not asked[:, choice].any()
    tree = proposed(decoder, params("del"), dataclasses.replace(state, finish=jnp.asarray([0, 1, 1, 0]))).tree
    assert tree.valid.sum(axis=1).tolist() == [4, 2, 2, 4]  # a rate of 0 drafts one token
    certain = jnp.full((4, 2), 40.0, jnp.float32)  # a threshold above 1: no token is sure enough to go on
    unsure = dataclasses.replace(state, draft=evidence([[0.9, 0.0]] * 4, certain, certain))
    assert (proposed(decoder, params("del"), unsure).tree.valid.sum(axis=1) == 2).all()


@pytest.mark.slow
def test_evidence_ends_at_the_first_mismatch(midway):
    """Rows: all accepted, one accepted, none accepted, finished."""
    decoder, state = midway
    drafter = decoder.drafter
    proposal = proposed(decoder, params("del"), favouring(state, 0))
    tokens = jnp.asarray([[7, 11, 12, 13]] * 4)
    tree = dataclasses.replace(proposal.tree, tokens=tokens)
    drawn = [[11, 12, 13, 50], [11, 60, -9, -9], [61, -9, -9, -9], [11, 12, 13, 50]]
    shadow = jnp.asarray([[[11, 12, 13, -1], [11, 0, 13, 50]]] * 4)  # the first drafted; the second has its own mind
    confidence = jnp.asarray([[[0.5, 0.25, 0.125, jnp.nan], [0.1, 0.2, 0.4, 0.8]]] * 4)
    old = evidence([[0.5, 0.2]] * 4, jnp.ones((4, 2)), jnp.full((4, 2), 3.0))
    accepted = jnp.asarray([3, 1, 0, 3])
    verdict = Verdict(jnp.zeros((4, 4), jnp.int32), accepted, jnp.asarray([50, 60, 61, 50]), jnp.asarray([4, 2, 1, 0]))
    pending = Pending(old, shadow, confidence)
    new = drafter.observe({}, pending, dataclasses.replace(proposal, tree=tree), None, verdict)
    for row in range(3):
        for i in range(2):
            hits, count, sure, unsure = 0, 0, 0.0, 0.0
            for node in range(int(accepted[row]) + 1):
                if shadow[row, i, node] < 0:
                    continue
                hit = int(shadow[row, i, node]) == drawn[row][node]
                count, hits = count + 1, hits + hit
                sure += float(confidence[row, i, node]) * hit
                unsure += float(confidence[row, i, node]) * (not hit)
            wanted = [0.95 * b + a for a, b in ((hits, [5, 2][i]), (count, 10), (sure, 1), (unsure, 3))]
            got = [float(x[row, i]) for x in (new.matched, new.seen, new.sure, new.unsure)]
            assert got == pytest.approx(wanted, rel=1e-5)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        np.testing.assert_array_equal(a[3], b[3])


def test_the_threshold_lies_between_the_confidences():
    some = evidence([[0.4, 1.0, 0.0]], jnp.asarray([[3.2, 9.0, 0.0]]), jnp.asarray([[1.2, 0.0, 2.0]]))
    np.testing.assert_allclose(some.threshold, [[(3.2 / 4 + 1.2 / 6) / 2, 0.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(some.rate, [[0.4, 1.0, 0.0]], rtol=1e-6)


def test_exits_are_chosen_and_checked():
    assert DynamicExit().bind(TARGET).exits == (1,)
    eight = dataclasses.replace(TARGET, config=changed(CONFIG, num_hidden_layers=8))
    assert DynamicExit().bind(eight).exits == (2, 4)
    assert DynamicExit(every=1).bind(eight).exits == (1, 2, 3, 4, 5, 6, 7)
    assert DynamicExit(every=3).bind(eight).exits == (3, 6)
    with pytest.raises(ValueError, match="every=8 leaves no exit inside a target of 8 layers"):
        DynamicExit(every=8).bind(eight)
    with pytest.raises(ValueError, match="inside a target of 3 layers"):
        specjax.speculative(TARGET, DynamicExit((1, 3)))
    with pytest.raises(ValueError, match="inside a target of 1"):
        DynamicExit().bind(TabularLM(4))
    with pytest.raises(ValueError, match="ascending"):
        DynamicExit((2, 1))
