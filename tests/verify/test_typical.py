"""Typical acceptance against its definition by hand; and its two ends, plain decoding's text and all that is possible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, plain, same

from specjax.assembly import registry
from specjax.lm import Output
from specjax.reference import trees, warpers
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree
from specjax.verify import Typical

TOPOLOGY = Topology.from_counts("3 | 2 0 1 | 1 1 1")
B, V = 32, 6
SAMPLING = SamplingArrays.make(B, temperature=[0.0, 0.8, 0.8, 0.8] * (B // 4))


@functools.partial(jax.jit, static_argnums=0)
def judge(verifier, tokens, logits, key):
    text = jnp.zeros((B, 8), jnp.int32)
    sampler = Sampler(jax.random.split(key, B), text, jnp.full((B,), 2), jnp.ones(B, bool), SAMPLING)
    tree = Tree.of(TOPOLOGY, tokens, tokens >= 0)
    draw = sampler.draw(logits, tree.depth, tree.path_tokens, tree.max_depth)
    return verifier(Output(delta=(), logits=logits, draw=draw), tree, sampler), draw


def by_hand(verifier, tokens, logits, draw, temperature):
    """The longest path, of equal ones the likeliest: depth and node."""
    parents, best = TOPOLOGY.parents, ((0, 0.0), 0)
    for node in range(1, len(parents)):
        worth = []
        for below in trees.path_to(parents, node)[1:]:
            above = parents[below]
            dist = warpers.softmax(warpers.warp(logits[above], temperature))
            if temperature == 0:
                dist = np.eye(V)[logits[above].argmax()]
            entropy = -sum(p * np.log(p) for p in dist if p > 0)
            token = tokens[below]
            typical = dist[token] > min(verifier.threshold, verifier.alpha * np.exp(-entropy))
            if token < 0 or not (typical or token == draw[above]):
                break
            worth.append(np.log(max(dist[token], 1e-300)))
        else:
            best = max(best, ((len(worth), sum(worth)), node), key=lambda each: each[0])
    return best[0][0], best[1]


@pytest.mark.parametrize("verifier", [Typical(), Typical(0.2, 0.6)], ids=["default", "strict"])
def test_by_hand(verifier):
    rng = np.random.default_rng(0)
    lengths = []
    for seed in range(3):
        tokens = rng.integers(-1, V, (B, len(TOPOLOGY.parents)))
        tokens[:, 0] = 0
        logits = (2 * rng.normal(size=(*tokens.shape, V))).astype(np.float32)
        verdict, draw = jax.tree.map(
            np.asarray, judge(verifier, jnp.asarray(tokens), jnp.asarray(logits), jax.random.key(seed))
        )
        for row in range(B):
            wanted = by_hand(verifier, tokens[row], logits[row], draw[row], 0.0 if row % 4 == 0 else 0.8)
            assert (verdict.accepted[row], verdict.path[row].max()) == wanted
            path = trees.path_to(TOPOLOGY.parents, wanted[1])
            assert verdict.path[row].tolist() == path + [-1] * (4 - len(path))
            assert verdict.next_token[row] == draw[row, wanted[1]]
        lengths.append(verdict.accepted)
    assert 0.2 < np.mean(lengths) < 2.5 and np.max(lengths) >= 2


def test_broken_distributions_pass_nothing():
    tokens = jnp.broadcast_to(jnp.asarray([0, 1, 2, 3, 1, 2, 1, 1, 1, 1]), (B, 10))
    logits = jnp.zeros((B, 10, V)).at[:, 0].set(jnp.nan)
    verdict, _ = judge(Typical(0.0), tokens, logits, jax.random.key(0))
    assert verdict.accepted.max() == 0 and (verdict.next_token == -1).all()
    verdict, _ = judge(Typical(0.0), tokens, logits.at[:, 0].set(0), jax.random.key(0))
    sampled = np.arange(B) % 4 > 0
    assert (np.asarray(verdict.accepted)[sampled] == 3).all()  # all that is possible


@pytest.mark.slow
def test_a_threshold_of_one_is_plain_decoding():
    same(complete(DRAFTERS["draft-chain"], MIXED, Typical(1.0, 1e9))[0], plain())


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["typical"].guarantee == "lossy"
    assert registry.make_verifier("typical:threshold=0.2,alpha=0.5") == Typical(0.2, 0.5)
    for fields in ({"threshold": 2.0}, {"alpha": -1.0}):
        with pytest.raises(ValueError, match=r"typical needs a threshold in \[0, 1\] and alpha"):
            Typical(**fields)
