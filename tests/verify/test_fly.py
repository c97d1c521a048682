"""Loosely speculative decoding against its definition by hand; without room for it, plain decoding's text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, plain, same
from support.judging import HEAT, TOPOLOGY, cases, likeliest, paths

from specjax.assembly import registry
from specjax.lm import Output
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree
from specjax.verify import Fly


def by_hand(case, threshold, window):
    p, tokens, draw, parents = case["p"], case["tokens"], case["draw"], TOPOLOGY.parents
    own = lambda node: tokens[node] == draw[parents[node]]
    heat, length = 1 if case["greedy"] else HEAT, max(map(len, paths(tokens)))

    def entropy(dist):
        cold = dist**heat / (dist**heat).sum()  # at temperature 1
        return -sum(x * np.log(x) for x in np.sort(cold)[-3:])

    def stands(path, at):
        if own(path[at]):
            return True
        behind = path[at + 1 : at + 1 + window]
        sure = entropy(p[parents[path[at]]]) < threshold or at + window + 1 >= length
        return not sure and len(behind) == window and all(map(own, behind))

    return likeliest([path for path in paths(tokens) if all(stands(path, at) for at in range(len(path)))], tokens, p)


@pytest.mark.parametrize("verifier", [Fly(0.3, 1), Fly(0.8, 0)], ids=str)
def test_by_hand(verifier):
    differ = []
    for (depth, node, token), case in cases(verifier, seeds=4):
        wanted = by_hand(case, verifier.threshold, verifier.window)
        assert (depth, node) == wanted and token == case["draw"][node]
        differ.append(by_hand(case, verifier.threshold, verifier.window + 1) != wanted)  # a window too long is seen
    assert sum(differ) >= 2


LENGTH = 15
SURE, UNSURE = (9.0, 0, 0, 0), (0.1, 0, 0, 0)  # H3 below 0.3, and above


@functools.partial(jax.jit, static_argnums=(0, 1))
def kept(verifier, length, tokens, logits, sampling):
    """How many of a drafted chain `[1, length]` are kept."""
    tokens = jnp.pad(tokens, ((0, 0), (1, LENGTH - length)), constant_values=-1).at[:, 0].set(0)
    tree = Tree.of(Topology.chain(LENGTH), tokens, tokens >= 0)
    one = jnp.ones(1, jnp.int32)
    sampler = Sampler(jax.random.split(jax.random.key(0), 1), jnp.zeros((1, 4), jnp.int32), one, one > 0, sampling)
    draw = jnp.argmax(logits, axis=-1)
    return verifier(Output((), logits=logits, draw=draw), tree, sampler).accepted[0]


CHAINS = [
    ("110111111011111", (), 9), ("110111111011111", (2,), 2), ("110111101111111", (), 2), ("110111110111111", (), 15),
    ("011111011111111", (), 15), ("11011", (), 2), ("111111111111111", (4,), 15), ("111111110111111", (), 15),
    ("111111111011111", (), 9), ("1101111", (), 2), ("110111", (), 2),
]  # fmt: skip


@pytest.mark.parametrize(("matches", "sure", "accepted"), CHAINS, ids=str)
def test_chains_are_kept_as_the_authors_program_keeps_them(matches, sure, accepted):
    """What it accepts of a draft by where it matches the target, at its own settings: windows of 6, a threshold of 0.3."""
    logits = jnp.asarray([[SURE if place in sure else UNSURE for place in range(LENGTH + 1)]])
    tokens = jnp.asarray([[0 if match == "1" else 2 for match in matches]])
    assert int(kept(Fly(), len(matches), tokens, logits, SamplingArrays.make(1))) == accepted


@pytest.mark.parametrize(("dist", "passes"), [((0.9, 0.05, 0.03, 0.02), True), ((0.92, 0.04, 0.02, 0.02), False)])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_entropy_is_of_the_three_likeliest_tokens_of_the_models_own_distribution(dist, passes, temperature):
    """Of the first distribution it is 0.3498, of the second 0.2837, whose whole entropy is 0.362."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(dist)), (1, LENGTH + 1, 4))
    tokens = jnp.zeros((1, LENGTH), jnp.int32).at[0, 3].set(1)
    assert int(kept(Fly(), LENGTH, tokens, logits, SamplingArrays.make(1, temperature))) == (LENGTH if passes else 3)


def test_what_the_target_may_not_write_does_not_stand():
    logits = jnp.broadcast_to(jnp.asarray(UNSURE), (1, LENGTH + 1, 4))
    for token, accepted in ((2, LENGTH), (3, 3)):
        tokens = jnp.zeros((1, LENGTH), jnp.int32).at[0, 3].set(token)
        assert int(kept(Fly(), LENGTH, tokens, logits, SamplingArrays.make(1, suppress_tokens=[[3]]))) == accepted


@pytest.mark.slow
def test_a_threshold_that_nothing_exceeds_is_plain_decoding():
    same(complete(DRAFTERS["draft-chain"], MIXED, Fly(1e9))[0], plain())


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["fly"].guarantee == "lossy" and not Fly.keeps_greedy
    assert registry.make_verifier("fly:threshold=0.2,window=3") == Fly(0.2, 3)
    for fields in ({"threshold": -1.0}, {"window": -1}):
        with pytest.raises(ValueError, match="fly needs a threshold and a window of at least 0"):
            Fly(**fields)
