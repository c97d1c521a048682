"""Drafts of adapted length: where each rule stops, and that a longer or shorter draft changes no text."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, TARGET, complete, params, plain, same, start

import specjax
from specjax.assembly import registry
from specjax.assembly.companions import LONGEST, Ruled
from specjax.draft import DFlash, Eagle, Goodput, Jacobi, Kangaroo, Medusa, PEagle, PromptLookup, View
from specjax.draft.acceptance import Acceptance, accept_log_prob
from specjax.draft.adaptive import Confidence, Online, adaptive
from specjax.expand import Chain
from specjax.sampling import Sampler
from specjax.tree import Topology, Tree
from specjax.verify import Rejection

GREEDY = dataclasses.replace(MIXED, options=({"temperature": 0.0},) * 8)


def bound(name, rule, length=3):
    """A drafter of the table under a rule, and everyone's parameters."""
    drafter = adaptive(DRAFTERS[name], rule, length).bind(TARGET)
    model = params(name)
    trained = isinstance(rule, Acceptance)
    head = rule.bind(drafter.drafter.lm).init_params(jax.random.key(1), model["draft"]) if trained else None
    own = {"drafter": model["draft"], "rule": head}
    return drafter, {**model, "draft": own}


@functools.cache
def seen():
    """The states after 0, 1 and 2 greedy steps: rules without a memory share them."""
    drafter, model = bound("draft-chain", Acceptance(0.6))
    decoder = specjax.speculative(TARGET, drafter)
    return [specjax.run(decoder, model, start(decoder, GREEDY, model=model), count) for count in range(3)]


def drafted(drafter, model):
    """Draft tokens `[steps, B]` of the first greedy steps."""
    propose = jax.jit(drafter.propose)
    counts = []
    for state in seen():
        view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=drafter.depth)
        sampler = Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)
        counts.append(np.asarray(propose(model, state.draft, view, sampler).tree.valid).sum(axis=1) - 1)
    return np.stack(counts)


ENDS = [
    (Acceptance(1.0), 3, 3), (Confidence(1.0), 1, 1), (Confidence(0.0), 3, 3), (Acceptance(0.0), 2, 2),
    (Acceptance(0.0, 1), 1, 2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule,least,most", ENDS, ids=str)
def test_thresholds_at_their_ends(rule, least, most):
    """The root's own factor is 1, so a threshold of 0 lets the first token pass and stops below the second."""
    counts = drafted(*bound("draft-chain", rule))
    assert counts.min() >= least and counts.max() <= most


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("draft-chain", Online(0.3)),
        pytest.param("draft-chain", Acceptance(0.6), marks=pytest.mark.slow),
        pytest.param("eagle1", Confidence(0.5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_rule_keeps_the_text(name, rule):
    drafter, model = bound(name, rule)
    got, state = complete(drafter, model=model)
    same(got, plain())
    assert (np.asarray(state.stats.accepted)[:, 1:]).sum() > 0 or name == "eagle1"


@pytest.mark.slow
def test_rejection_takes_a_chain_that_stops_early():
    drafter, model = bound("draft-chain", Online(0.3))
    got, _ = complete(drafter, GREEDY, Rejection(), model=model)
    same(got, plain(GREEDY))


CUT = {"rule": None, "drafter": None}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("prompt_lookup:length=3,min_ngram=1", Goodput(draft_pass=0, draft_row=0, target_pass=1, target_token=0.01)),
        pytest.param("ngram_mod:length=3,ngram=1", Online(0.3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_whole_chain_is_cut_and_the_text_stays(line, rule):
    """Where verifying costs nothing, goodput cuts nothing of what was found."""
    model = {**params("none"), "draft": CUT}
    inner = registry.parse("drafter", registry.DRAFTERS, line)
    got, state = complete(adaptive(inner, rule), model=model)
    same(got, plain())
    whole, free = complete(inner)
    cut, every = (np.asarray(found.stats.accepted)[:, 1:].sum() for found in (state, free))
    assert cut > 0 and (cut == every or isinstance(rule, Online))


def test_where_tokens_are_dear_nothing_is_drafted():
    """A row whose guesses failed is cut to none, and beside it one whose guesses held too: they decide together."""
    drafter = adaptive(PromptLookup(3, ngram=1, min_ngram=1), Goodput(0, 0, 1, 0, 1.0)).bind(TARGET)
    view = View(jnp.asarray([[5, 6, 7, 5]] * 2), jnp.full((2,), 4), jnp.ones((2,), bool), None, max_depth=3)
    model = {"target": None, "draft": CUT}
    state = drafter.init(model, 2, 16)
    assert drafter.rungs == (1, 2, 3, 4) == adaptive(PromptLookup(3), Online()).bind(TARGET).rungs
    lengths = lambda hits: np.asarray(
        drafter.propose(model, (state[0], (jnp.asarray(hits), jnp.full((2,), 20.0))), view, None).tree.valid.sum(axis=1)
        - 1
    ).tolist()
    assert lengths([20.0, 20.0]) == [3, 3] and lengths([0.0, 0.0]) == [0, 0]


def test_acceptance_stops_by_the_product_of_what_was_judged():
    """Lengths follow from the head's own chances, one token late."""
    rule = Acceptance(0.5, 1).bind(SimpleNamespace(embed=lambda params, tokens: jnp.zeros((1, 1, 4))))
    own = rule.init_params(jax.random.key(2), None)
    h = jax.random.normal(jax.random.key(3), (6, 3, 4))
    goes_on = rule.start(own, (), None, 6, lambda carry: carry)
    alive, lengths = np.ones(3, bool), np.ones(3, int)
    survival = np.ones(3)
    for depth in range(1, 6):
        on = np.asarray(goes_on(depth, jnp.ones(3), h[depth]))
        if depth > 1:
            survival = survival * np.exp(np.asarray(accept_log_prob(own, h[depth])))
        np.testing.assert_array_equal(on, 1 - survival <= 0.5)
        alive = alive & on
        lengths += alive
    assert lengths.min() < 6


def test_online_lengths():
    rule = Online(cost=0.25)
    best = lambda rate: int(rule.best(jnp.asarray([rate]), 8)[0])
    found = [best(rate) for rate in (0.01, 0.3, 0.6, 0.8, 0.99)]
    assert found[0] == 1 and found[-1] == 8 and found == sorted(found)
    brute = [max(range(1, 9), key=lambda k: sum(0.8**i for i in range(k + 1)) / (1 + 0.25 * k))]
    assert best(0.8) == brute[0]


def test_online_evidence():
    """Accepted tokens count as hits, the first rejected one as a miss, those after it as nothing."""
    rule = Online(cost=0.25, decay=0.5, prior=0.5)
    tokens = jnp.ones((4, 4), jnp.int32)
    valid = jnp.arange(4)[None] < jnp.asarray([[4], [4], [2], [4]])
    tree = Tree.of(Topology.chain(3), tokens, valid)
    hits, count = rule.observe(rule.init(4), tree, jnp.asarray([0, 2, 1, 3]), jnp.asarray([True, True, True, False]))
    np.testing.assert_allclose(hits, [0.25, 2.25, 1.25, 0.5])
    np.testing.assert_allclose(count, [1.5, 3.5, 1.5, 1.0])


def test_a_drafter_must_show_its_features():
    with pytest.raises(ValueError, match="reads the draft's features, and Medusa shows none"):
        adaptive(Medusa(heads=5), Acceptance(), 3).bind(TARGET)
    with pytest.raises(ValueError, match="reads the draft's features, and PEagle shows none"):
        adaptive(PEagle(), Acceptance(), 3).bind(TARGET)
    with pytest.raises(ValueError, match="rule=confidence ends chains, and kangaroo grows a tree"):
        adaptive(Kangaroo(exit_layer=1), Confidence(0.5), 3).bind(TARGET)
    with pytest.raises(
        ValueError, match="rule=online cuts chains that are copied, and jacobi learns from the target: leave"
    ):
        adaptive(Jacobi(3), Online()).bind(TARGET)
    with pytest.raises(ValueError, match="prompt_lookup has none: choose one of online, goodput, utility"):
        adaptive(PromptLookup(), Confidence(0.5)).bind(TARGET)
    with pytest.raises(ValueError, match="cost > 0"):
        Online(cost=0.0)


def test_a_chain_of_a_block_is_as_long_as_the_block():
    """Where the line sets no length; where it sets too much, the error says what would do."""
    model = SimpleNamespace(lm=TARGET, name="target")
    made, _ = Ruled(DFlash(Chain(1), block=4), Confidence(0.5), 0).load(model)
    assert made.length == 3
    assert Ruled(Eagle(), Confidence(0.5), 0).load(model)[0].length == LONGEST
    with pytest.raises(ValueError, match=re.escape("choose one of at most 3 levels (length=3)")):
        Ruled(DFlash(Chain(1), block=4), Confidence(0.5), 8).load(model)
    line = registry.parse("drafter", registry.DRAFTERS, "dflash:model=a,rule=goodput")
    assert line.length == 0 and line.drafter.fields["expander"] == Chain(1)
