"""GAD++'s acceptance against its definition by hand, and the sets that the authors' program makes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, but_slow, complete, plain, same
from support.judging import HEAT, TOPOLOGY, V, cases, likeliest, paths

from specjax.assembly import registry
from specjax.lm import Output
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree
from specjax.verify import GadPlus


def allowed(logits, beta, tau):
    """The authors' set: of the first `beta` in the order of logits, those that are at most `tau` below the first."""
    order = np.argsort(-logits, kind="stable")[:beta]
    return {int(token) for token in order if logits[order[0]] - logits[token] <= tau}


def by_hand(case, beta, tau):
    parents, heat = TOPOLOGY.parents, 1 if case["greedy"] else HEAT

    def stands(node):
        above, token = parents[node], case["tokens"][node]
        return token == case["draw"][above] or token in allowed(np.log(case["p"][above]) * heat, beta, tau)

    ends = [path for path in paths(case["tokens"]) if all(map(stands, path))]
    return likeliest(ends, case["tokens"], case["p"])


@pytest.mark.parametrize(
    "verifier",
    but_slow([GadPlus(3, 3.0), GadPlus(2, 1.0), GadPlus(V + 3, 2.0)], GadPlus(2, 1.0), GadPlus(V + 3, 2.0)),
    ids=str,
)
def test_by_hand(verifier):
    differ = []
    for (depth, node, token), case in cases(verifier, seeds=2):
        assert (depth, node) == by_hand(case, verifier.beta, verifier.tau) and token == case["draw"][node]
        differ.append(depth != by_hand(case, 1, 0.0)[0])
    assert sum(differ) >= 8


@functools.partial(jax.jit, static_argnums=0)
def kept(verifier, logits, sampling, other=0):
    """Whether each token `[B]` passes as the only draft after the root, in a row of its own; logits `[B, V]`.

    The target draws its likeliest token, or the one that is `other` further on in the vocabulary.
    """
    rows, size = logits.shape
    tree = Tree.of(
        Topology.chain(1), jnp.stack([jnp.zeros(rows, jnp.int32), jnp.arange(rows)], axis=1), jnp.ones((rows, 2), bool)
    )
    one = jnp.ones(rows, jnp.int32)
    sampler = Sampler(
        jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, 4), jnp.int32), one, one > 0, sampling
    )
    both = jnp.broadcast_to(logits[:, None], (rows, 2, size))
    draw = jnp.argmax(sampler.penalised(both, tree.path_tokens), axis=-1) + other
    return verifier(Output((), logits=both, draw=draw), tree, sampler).accepted == 1


def passing(beta, tau, logits, other=0, **sampling):
    logits = np.asarray(logits, np.float32)
    rows = jnp.asarray(np.broadcast_to(logits, (len(logits), len(logits))))
    got = kept(GadPlus(beta, tau), rows, SamplingArrays.make(len(logits), **sampling), other)
    return {*np.flatnonzero(got).tolist()}


@pytest.mark.parametrize(
    ("beta", "tau", "tokens"), [(1, 0.0, {0}), (3, 1.0, {0, 1}), (3, 3.0, {0, 1, 2}), (5, 3.0, {0, 1, 2})]
)
def test_sets_are_the_authors(beta, tau, tokens):
    assert passing(beta, tau, (2.0, 1.5, -0.5, -2.0)) == tokens == allowed(np.array((2.0, 1.5, -0.5, -2.0)), beta, tau)


@pytest.mark.slow
def test_every_token_of_many_distributions():
    rng = np.random.default_rng(0)
    for number in range(24):
        logits, beta, tau = 2 * rng.normal(size=8).astype(np.float32), number % 3 * 2 + 1, (0.5, 3.0)[number % 2]
        assert passing(beta, tau, logits) == allowed(logits, beta, tau)


def test_what_the_target_may_not_write_does_not_pass_and_ties_do():
    logits = (2.0, 1.5, 1.0, -2.0)
    assert passing(3, 3.0, logits, suppress_tokens=[[1]] * 4) == {0, 2}
    assert passing(2, 3.0, (2.0, 1.0, 1.0, 1.0)) == {0, 1, 2, 3}


def test_a_penalty_counts_and_the_likeliest_token_passes_beside_another_draw():
    """Token 0 is in the text. A sampled row with `beta=1` keeps the likeliest token, which `Coupled` would not."""
    logits = (2.0, 1.5, 1.0, -2.0)
    for temperature in (0.0, 1.0):
        assert passing(1, 0.0, logits, presence_penalty=0.75, temperature=temperature) == {1}
    assert passing(1, 0.0, logits, other=2, temperature=1.0) == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [GadPlus(1, 3.0)], ids=str)
def test_the_likeliest_token_alone_is_plain_decoding_in_greedy_rows(verifier):
    greedy = dataclasses.replace(MIXED, options=({"temperature": 0.0},) * 8)
    same(complete(DRAFTERS["draft-chain"], greedy, verifier)[0], plain(greedy))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["gad_plus"].guarantee == "lossy" and not GadPlus.keeps_greedy
    assert registry.make_verifier("gad_plus:beta=3,tau=1") == GadPlus(3, 1.0)
    for fields in ({"beta": 0}, {"tau": -1.0}, {"tau": float("nan")}):
        with pytest.raises(ValueError, match="gad_plus needs beta >= 1 and tau >= 0"):
            GadPlus(**fields)
