"""Block verification keeps the target's distribution, and more tokens than any rule token by token; seen to fail when
broken."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import (
    ALPHA,
    MODEL,
    PARAMS,
    ROWS,
    V,
    along,
    context_tables,
    exact,
    generate,
    sampled_p_value,
    tables,
)

import specjax
from specjax.draft import ModelDrafter, PromptLookup
from specjax.expand import Static
from specjax.reference import rejection as oracle
from specjax.verify import Block, block

CASES = list(itertools.product(("full", "sparse", "one_hot"), repeat=2))


def judged(p, q, proposed):
    """Every draft with its chance, the chance `[M, K + 1]` that so many are kept, and the weights of what follows."""
    depth = len(q)
    tokens = np.array(list(itertools.product(range(V), repeat=depth)))
    p_rows, q_rows = along(p, tokens), along(q, tokens)
    drawn = np.prod(np.take_along_axis(q_rows, tokens[:, :, None], 2)[..., 0], axis=1)
    valid = jnp.asarray(np.broadcast_to(np.arange(depth) < proposed, tokens.shape))
    with jax.enable_x64(True):
        ours, theirs, text = map(jnp.asarray, (p_rows, q_rows, tokens))
        weight = block.carried(ours, theirs, text, valid)
        chance = np.array(block.chances(ours, theirs, weight, valid))
        left = [
            np.asarray(block.residual(ours, theirs, weight, valid, jnp.full(len(tokens), i))) for i in range(depth + 1)
        ]
    assert chance.dtype == np.float64 and (chance >= 0).all() and (chance <= 1 + 1e-12).all()
    chance[:, 0] = 1
    chance[:, proposed + 1 :] = 0
    rejected = np.cumprod(np.pad(1 - chance[:, :0:-1], ((0, 0), (1, 0)), constant_values=1), axis=1)[:, ::-1]
    return tokens, drawn, chance * rejected, left


def distribution_of(p, q, proposed):
    """The joint distribution of len(p) tokens; texts that come out short go on with p."""
    tokens, drawn, kept, left = judged(p, q, proposed)
    dist = np.zeros((V,) * len(p))
    for i, weights in enumerate(left):
        for row in np.flatnonzero(drawn * kept[:, i]):
            prefix = tuple(tokens[row, :i])
            rest = weights[row] / weights[row].sum()
            for table in p[i + 1 :]:
                rest = rest[..., None] * table[prefix]
            dist[prefix] += drawn[row] * kept[row, i] * rest
    return dist


def accepted_of(p, q):
    """The mean number of kept tokens."""
    _, drawn, kept, _ = judged(p, q, len(q))
    return float(drawn @ kept @ np.arange(len(q) + 1))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", [*CASES, "equal"], ids=str)
def test_the_joint_distribution_is_the_targets_to_1e12(case, depth):
    rng = np.random.default_rng(depth)
    if case == "equal":
        p = tables(rng, depth + 1)
        q = p[:-1]
    else:
        p, q = tables(rng, depth + 1, case[0]), tables(rng, depth, case[1])
    for proposed in range(depth + 1):  # the drafter may have proposed less
        assert np.abs(distribution_of(p, q, proposed) - oracle.joint(p)).max() < 1e-12


def test_it_keeps_at_least_as_many_as_token_by_token():
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(20):
        p, q = tables(rng, 4), tables(rng, 3)
        gains.append(accepted_of(p, q) - oracle.expected_accepted(p, q))
    assert min(gains) > -1e-12 and max(gains) > 0.02
    one = tables(rng, 2), tables(rng, 1)
    assert accepted_of(*one) == pytest.approx(oracle.expected_accepted(*one), abs=1e-12)


def test_the_papers_example():
    """Two tokens of p = (1/3, 2/3) and q = (2/3, 1/3), whatever the context: 11/9 kept, 10/9 token by token."""
    widen = lambda dist, i: np.broadcast_to([*dist, 0, 0], (V,) * i + (V,))
    p, q = ([widen(dist, i) for i in range(n)] for dist, n in (((1 / 3, 2 / 3), 3), ((2 / 3, 1 / 3), 2)))
    assert accepted_of(p, q) == pytest.approx(11 / 9, abs=1e-12)
    assert oracle.expected_accepted(p, q) == pytest.approx(10 / 9, abs=1e-12)


@pytest.mark.slow
def test_tokens_that_are_taken_as_they_are_keep_the_distribution():
    """Chi-square of 60,000 texts by the jitted decoder, at 1e-3, see `test_power` of `test_rejection.py`."""
    assert sampled_p_value(PromptLookup(3), Block()) > ALPHA


def test_mean_accepted_is_the_expected_one_within_4_sigma():
    accepted = np.asarray(generate(MODEL, Block(), steps=1).stats.accepted) @ np.arange(3)
    expected = accepted_of(exact(), context_tables(PARAMS["draft"], 2))
    assert expected > oracle.expected_accepted(exact(), context_tables(PARAMS["draft"], 2)) + 0.005
    assert abs(accepted.mean() - expected) < 4 * accepted.std() / np.sqrt(ROWS)


@dataclasses.dataclass(frozen=True)
class Stale(Block):
    """Uses the noise of a position again in the next step."""

    own_noise = False


@pytest.mark.slow
def test_noise_that_is_used_again_is_caught():
    assert sampled_p_value(MODEL, Stale()) < ALPHA


def test_trees_are_refused():
    with pytest.raises(ValueError, match="the block verifier takes chains"):
        specjax.speculative(MODEL.lm, ModelDrafter(MODEL.lm, Static()), Block())
