"""Judge decoding against its definition by hand; heads that find nothing and everything right; the shipped head."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, DRAFTERS, MIXED, TARGET, complete, params, plain, same
from support.judging import TOPOLOGY, V, cases, likeliest, paths
from support.judging import judge as verdict_of

from specjax import models
from specjax.assembly import registry
from specjax.decode import Speculate
from specjax.verify import Judge

HEAD = {"kernel": jnp.asarray([0.8, -0.5, 0.3]), "bias": jnp.asarray([-0.4])}


def by_hand(case, threshold, shift=0):
    tokens, parents = case["tokens"], TOPOLOGY.parents
    logits = np.roll(case["features"], shift, axis=0) @ np.asarray(HEAD["kernel"]) + float(HEAD["bias"][0])
    right = 1 / (1 + np.exp(-logits)) > threshold
    stands = lambda node: right[node] or tokens[node] == case["draw"][parents[node]]
    return likeliest([path for path in paths(tokens) if all(map(stands, path))], tokens, case["p"])


@pytest.mark.parametrize("threshold", [0.5, 0.3])
def test_by_hand(threshold):
    differ = []
    for (depth, node, token), case in cases(Judge(threshold), params=HEAD, width=3):
        wanted = by_hand(case, threshold)
        assert (depth, node) == wanted and token == case["draw"][node]
        differ.append(by_hand(case, threshold, shift=1) != wanted)  # a head that reads the node before is seen
    assert sum(differ) >= 10


def decode(bias, name="draft-chain", rows=MIXED, **fields):
    """Texts and state with a head that finds every token as right as its bias says."""
    head = {"kernel": jnp.zeros((CONFIG.hidden_size,)), "bias": jnp.asarray([bias])}
    return complete(DRAFTERS[name], rows, Judge(**fields), model=params(name) | {"verify": head})


@pytest.mark.slow
def test_a_head_that_finds_nothing_right_is_plain_decoding():
    wanted, state = complete(DRAFTERS["draft-chain"], MIXED)
    got, judged = decode(-np.inf)
    same(got, wanted)
    np.testing.assert_array_equal(judged.stats.steps, state.stats.steps)


@pytest.mark.slow
def test_a_head_that_finds_all_right_keeps_all():
    """Whole chains, but for tokens that a row's filters rule out."""
    accepted = np.asarray(decode(np.inf)[1].stats.accepted)
    free = [row for row, options in enumerate(MIXED.options) if not options.keys() & {"top_k", "top_p"}]
    assert accepted[free, -1].all() and not accepted[free, :-1].any()
    assert accepted[5, :-1].any()  # top_k=5


@pytest.mark.slow
def test_trees():
    same(decode(-np.inf, "draft-top_k")[0], plain())
    accepted = np.asarray(decode(np.inf, "draft-top_k")[1].stats.accepted)
    assert (
        accepted[0, -1] and not accepted[0, 0]
    )  # the root always has a child, and not every tree is as deep as it may be


def test_what_has_no_distribution_is_never_kept():
    tokens = jnp.broadcast_to(jnp.asarray([0, 1, 2, 3, 1, 2, 1, 1, 1, 1]), (32, 10))
    head = HEAD | {"bias": jnp.asarray([jnp.inf])}
    features, logits = jnp.zeros((32, 10, 3)), jnp.zeros((32, 10, V))
    found = lambda logits: verdict_of(Judge(), tokens, logits, jax.random.key(0), None, head, features)[0]
    assert (found(logits).accepted == 3).all()
    assert (found(logits.at[:, 0].set(jnp.nan)).accepted == 0).all()
    assert (found(logits.at[:, 0, 1:4].set(-jnp.inf)).accepted == 0).all()  # a filter


def test_its_head_is_loaded_or_given():
    tiny = models.load("tiny", dtype="float32")
    verifier, head = registry.build_verifier("judge:threshold=0.7", tiny)
    assert verifier == Judge(0.7, target=tiny.lm)
    assert (
        head["kernel"].shape == (tiny.lm.config.hidden_size,) and np.any(head["kernel"]) and head["bias"].shape == (1,)
    )
    decoder, own = Speculate("none", verifier=(Judge(), HEAD)).bind(tiny)
    assert decoder.verifier == Judge(target=tiny.lm) and own["verify"] is HEAD
    model = SimpleNamespace(lm=TARGET, params=params()["target"], abstract=False)
    with pytest.raises(ValueError, match="a Judge needs its parameters: give verifier="):
        registry.build_verifier(Judge(), model)
    with pytest.raises(ValueError, match=r'judge reads a trained head: give it as params\["verify"\]'):
        verdict_of(Judge(), jnp.zeros((32, 10), jnp.int32), jnp.zeros((32, 10, V)), jax.random.key(0))
    with pytest.raises(ValueError, match="was trained for the target 'tiny', and 'tiny-draft' is another model"):
        registry.build_verifier("judge:model=tiny-judge", models.load("tiny-draft", dtype="float32"))
    described = registry.build_verifier("judge", dataclasses.replace(tiny, params=jax.eval_shape(lambda: tiny.params)))[
        1
    ]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == jax.tree.map(lambda x: (x.shape, x.dtype), head)


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["judge"].guarantee == "lossy" and not Judge.keeps_greedy
    with pytest.raises(ValueError, match=r"judge needs a threshold in \[0, 1\]"):
        Judge(1.5)
