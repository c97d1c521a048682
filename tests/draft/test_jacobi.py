"""Jacobi decoding: the oracle against published figures, the decoder against the oracle, and what a window keeps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.assembly import registry
from specjax.draft import Jacobi, PromptLookup, Proposal, Verdict, View, fuse
from specjax.draft.jacobi import Window, places
from specjax.lm import Output
from specjax.models.tabular import TabularLM
from specjax.prompts import Prompts
from specjax.reference import jacobi as oracle
from specjax.reference import rejection, statistics
from specjax.sampling import SamplingArrays
from specjax.sampling.noise import gumbel
from specjax.tree import Topology, Tree
from specjax.verify import Rejection

START = 3
CHAIN = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
NOISE = np.array(
    [[-.013, 1.157, 3.174], [4.094, -.518, -.892], [.069, -.268, .243], [-1.006, -.526, 5.899], [-.667, 3.377, -.269],
     [1.644, -.688, .249], [1.032, .599, 3.55], [2.02, -.105, -.041], [.046, .726, -1.772], [-1.375, -.146, -.05],
     [-.154, .708, 1.93], [-.246, .294, .99]]
)  # fmt: skip
V, ROWS, NEW, ALPHA = 3, 20_000, 3, 1e-3
LM = TabularLM(V)
PARAMS = {"target": {"table": jnp.log(jnp.asarray(CHAIN[:V], jnp.float32))}, "draft": None}


def exact(new, start=START):
    tables = [np.broadcast_to(CHAIN[start], (V,))]
    for length in range(1, new):
        tables.append(np.broadcast_to(CHAIN[:V], (V,) * (length - 1) + (V, V)))
    return rejection.joint(tables)


# ---- the oracle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "fill", "passes"), [(3, "repeat", 1.960), (4, "repeat", 2.651), (3, "random", 1.5056)])
def test_the_oracle_is_exact_and_has_the_known_passes(new, fill, passes):
    """Upstream drops the draw after the last slot."""
    dist, found = oracle.expected(CHAIN, START, (0, 0), new, fill, keep_last=False)
    assert np.abs(dist - exact(new)).max() < 1e-12
    assert found == pytest.approx(passes, abs=5e-4)


@pytest.mark.parametrize(("width", "passes"), [(1, 9), (2, 7), (3, 6), (4, 6), (8, 4)])
def test_the_oracle_with_given_noise(width, passes):
    assert oracle.coupled(CHAIN, START, (0,) * width, NOISE) == ([2, 0, 0, 2, 1, 0, 2, 2, 1, 1, 2, 2], passes)


# ---- the decoder ----------------------------------------------------------------------------------------------------


def run(drafter, verifier, rows, new, root=1):
    decoder = specjax.speculative(LM, drafter, verifier)
    many = lambda number: jnp.full((rows,), number, jnp.int32)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), rows)
    sampling = SamplingArrays({"temperature": jnp.ones((rows,))})
    prompts = Prompts(jnp.broadcast_to(jnp.asarray([0, root]), (rows, 2)), many(2), keys, many(2 + new), sampling)
    state = decoder.init(PARAMS, prompts, capacity=2 + new + decoder.slack)
    state = specjax.run(decoder, PARAMS, state)
    return np.asarray(state.tokens)[:, 2 : 2 + new], np.asarray(state.stats.steps), keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draws", "fill", "width"), [("own", "repeat", 1), ("own", "random", 2), ("shared", "repeat", 2)]
)
def test_by_rejection_it_has_the_exact_distribution_and_the_expected_passes(draws, fill, width):
    text, steps, _ = run(Jacobi(width, draws, fill), Rejection(), ROWS, NEW)
    counts = np.zeros((V,) * NEW)
    np.add.at(counts, tuple(text.T), 1)
    assert statistics.chi_square(counts, exact(NEW, start=1)) > ALPHA
    first = (1,) * width
    passes, dropped = (oracle.expected(CHAIN, 1, first, NEW, fill, keep_last=last)[1] for last in (True, False))
    if draws == "own":
        assert abs(steps.mean() - passes) < 3.5 * steps.std() / ROWS**0.5
    assert steps.mean() < NEW and (width > 1 or abs(dropped - passes) > 0.05)


@pytest.mark.slow
def test_by_shared_noise_it_has_plain_decodings_text_in_the_oracles_passes():
    rows, new, width = 60, 12, 3
    text, steps, keys = run(Jacobi(width, fill="repeat"), None, rows, new)
    noise = np.asarray(gumbel(keys, jnp.broadcast_to(2 + jnp.arange(new), (rows, new)), V))
    for row in range(rows):
        assert (text[row].tolist(), steps[row]) == oracle.coupled(CHAIN, 1, (1,) * width, noise[row])
    assert steps.min() < steps.max()


# ---- a window -------------------------------------------------------------------------------------------------------


def view_of(texts):
    tokens = np.full((len(texts), 16), 9, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    return View(jnp.asarray(tokens), lengths, jnp.ones(len(texts), bool), (), max_depth=4)


@functools.partial(jax.jit, static_argnums=0)
def moved(drafter, state, proposal, draw, verdict, view):
    """What a window keeps, and the next one."""
    state = drafter.observe({}, state, proposal, Output((), draw=draw), verdict)
    return state.kept, drafter.propose({}, state, view, None).tree.tokens[:, 1:]


def test_what_follows_a_rejected_token_moves_up_and_the_rest_is_filled():
    """Rows accept 0, 2 and all of 4 tokens; their texts continue, or have nothing to copy."""
    window = jnp.asarray([[1, 2, 3, 4]] * 3)
    proposal = Proposal(Tree.of(Topology.chain(4), jnp.pad(window, ((0, 0), (1, 0))), jnp.ones((3, 5), bool)), ())
    draw = jnp.asarray([[5, 6, 7, 8, 10], [1, 2, 7, 8, 10], [1, 2, 3, 4, 10]])
    accepted = jnp.asarray([0, 2, 4])
    state = Window(window, jnp.zeros(3, jnp.int32), None)
    view = view_of([[0, 5], [6, 4, 6, 4], [0, 10]])
    verdict = Verdict(window, accepted, accepted, accepted)
    kept, then = moved(Jacobi(4).bind(TabularLM(12)), state, proposal, draw, verdict, view)
    assert kept.tolist() == [4, 2, 0]
    assert then.tolist() == [[6, 7, 8, 10], [8, 10, 6, 4], [10, 10, 10, 10]]


@pytest.mark.slow
def test_its_nodes_are_found_in_a_tree_with_others():
    tree = Tree.of(Topology.from_counts("2 | 1 1 | 1 1"), jnp.asarray([[0, 7, 1, 7, 2, 8, 5]]), jnp.ones((1, 7), bool))
    node, there = places(tree, jnp.asarray([[1, 2, 3]]), jnp.asarray([[1, 2, 3]]))
    assert node[0, :2].tolist() == [2, 4] and there.tolist() == [[True, True, False]]
    drafter = fuse(Jacobi(2, fill="repeat"), PromptLookup(length=2, min_ngram=1))
    rows, new = 60, 12
    both, steps, _ = run(drafter, None, rows, new)
    alone, more, _ = run(Jacobi(2, fill="repeat"), None, rows, new)
    np.testing.assert_array_equal(both, alone)
    assert steps.sum() < more.sum()


def test_only_a_verifier_that_reads_distributions_makes_it_keep_them():
    assert Jacobi(2).bind(LM).init({}, 1, 8).logits is None
    by = specjax.speculative(LM, Jacobi(2), Rejection()).drafter
    assert by.init({}, 1, 8).logits.shape == (1, 2, V) and by.children == "coupled"
    assert dataclasses.replace(by, draws="own").children == "iid"
    assert specjax.speculative(LM, Jacobi(2)).drafter.children == "deterministic"


def test_fields():
    assert registry.parse("drafter", registry.DRAFTERS, "jacobi:length=3,draws=own,fill=random") == Jacobi(
        3, "own", "random"
    )
    assert registry.parse("drafter", registry.DRAFTERS, "jacobi:preset=paper") == Jacobi(16, "own", "random")
    for bad in ({"length": 0}, {"draws": "none"}, {"fill": "none"}):
        with pytest.raises(ValueError, match="jacobi needs length"):
            Jacobi(**bad)
    with pytest.raises(ValueError, match="no field 'keep_q'"):
        registry.parse("drafter", registry.DRAFTERS, "jacobi:keep_q=true")
