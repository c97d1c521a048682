"""Rejection sampling keeps the target's distribution: by enumeration, and seen to fail when broken. The texts of the
jitted decoder are counted in `tests/guarantees/`."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import (
    ALPHA,
    MODEL,
    NEW,
    OPTIONS,
    PARAMS,
    PROMPT,
    ROWS,
    TARGET,
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
from specjax.expand import Chain, Static, TopK
from specjax.lm import Output
from specjax.reference import rejection as oracle
from specjax.reference import statistics
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree
from specjax.verify import Coupled, Rejection, rejection

# ---- by enumeration -------------------------------------------------------------------------------------------------


def enumerated_distribution(p, q, proposed):
    """The joint distribution of len(p) tokens when the verifier's own functions judge `proposed` draft tokens from q.

    Uniforms are integrated exactly: the only thing that matters is on which side of p / q they lie. Texts that come out
    short go on with p.
    """
    depth = len(q)
    drafts = np.array(list(itertools.product(range(V), repeat=depth)))
    passes = np.array(list(itertools.product([True, False], repeat=depth)))
    tokens = np.repeat(drafts, len(passes), axis=0)
    passes = np.tile(passes, (len(drafts), 1))
    p_rows, q_rows = along(p, tokens), along(q, tokens)
    at = tokens[:, :, None]
    p_at = np.take_along_axis(p_rows[:, :-1], at, 2)[..., 0]
    q_at = np.take_along_axis(q_rows, at, 2)[..., 0]
    edge = np.minimum(np.divide(p_at, q_at, out=np.ones_like(p_at), where=q_at > 0), 1)
    uniforms = np.where(passes, edge / 2, (1 + edge) / 2)
    chance = np.prod(q_at * np.where(passes, edge, 1 - edge), axis=1)
    valid = np.broadcast_to(np.arange(depth) < proposed, tokens.shape)
    with jax.enable_x64(True):
        accepted = np.asarray(
            rejection.count_accepted(*map(jnp.asarray, (p_rows[:, :-1], q_rows, tokens, uniforms, valid)))
        )
        weights = np.asarray(rejection.residual(*map(jnp.asarray, (p_rows, q_rows, valid, accepted))))
        assert weights.dtype == np.float64
    weights = np.maximum(weights, 0)
    dist = np.zeros((V,) * len(p))
    for row in np.flatnonzero(chance):
        kept = tuple(tokens[row, : accepted[row]])
        rest = weights[row] / weights[row].sum()
        for table in p[len(kept) + 1 :]:
            rest = rest[..., None] * table[kept]
        dist[kept] += chance[row] * rest
    return dist


def enumeration_error(p, q, proposed):
    return np.abs(enumerated_distribution(p, q, proposed) - oracle.joint(p)).max()


CASES = {
    "full": ("full", "full"),
    "sparse_p": ("sparse", "full"),
    "sparse_q": ("full", "sparse"),
    "sparse": ("sparse", "sparse"),
    "one_hot_p": ("one_hot", "full"),
    "one_hot_q": ("full", "one_hot"),
    "one_hot": ("one_hot", "one_hot"),
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", [*CASES, "equal"])
def test_the_joint_distribution_is_the_targets_to_1e12(case, depth):
    rng = np.random.default_rng(depth)
    if case == "equal":
        p = tables(rng, depth + 1)
        q = p[:-1]
    else:
        p, q = tables(rng, depth + 1, CASES[case][0]), tables(rng, depth, CASES[case][1])
    for proposed in range(depth + 1):  # the drafter may have proposed less
        assert enumeration_error(p, q, proposed) < 1e-12


def test_functions_equal_the_oracle_row_by_row():
    rng = np.random.default_rng(0)
    rows, depth = 200, 3
    p, q = rng.dirichlet(np.ones(V), (rows, depth + 1)), rng.dirichlet(np.ones(V), (rows, depth))
    tokens, uniforms = rng.integers(0, V, (rows, depth)), rng.random((rows, depth))
    valid = np.ones((rows, depth), bool)
    with jax.enable_x64(True):
        accepted = rejection.count_accepted(*map(jnp.asarray, (p[:, :-1], q, tokens, uniforms, valid)))
        weights = np.asarray(rejection.residual(*map(jnp.asarray, (p, q, valid, accepted))))
    for row in range(rows):
        count, dist = oracle.chain(p[row], q[row], tokens[row], uniforms[row])
        assert int(accepted[row]) == count
        np.testing.assert_allclose(weights[row] / weights[row].sum(), dist, atol=1e-14)


def masked_token_passes():
    """Whether a token that the target cannot say is accepted at the smallest uniform, 0."""
    p, q = jnp.asarray([[[1.0, 0.0]]]), jnp.asarray([[[0.5, 0.5]]])
    passed = rejection.count_accepted(p, q, jnp.asarray([[1]]), jnp.zeros((1, 1)), jnp.ones((1, 1), bool))
    return int(passed[0]) > 0


def test_a_masked_token_never_passes():
    assert not masked_token_passes()


# ---- by counting on the real path -----------------------------------------------------------------------------------


def test_power():
    """60,000 texts of 64 kinds: a distribution 0.02 away in total variation fails at 1e-3 with probability above
    0.99."""
    assert statistics.power(ROWS, V**NEW, 0.02, ALPHA) > 0.99


@dataclasses.dataclass(frozen=True)
class Unrecorded(Chain):
    """A chain that says nothing of what it was drawn from."""

    def __call__(self, *args, keep_q=False):
        return super().__call__(*args)


@pytest.mark.slow
def test_unrecorded_chains_keep_the_distribution_too():
    """A chain that brings no `log_q` is judged as deterministic: the drafter's noise is not the verifier's."""
    assert sampled_p_value(ModelDrafter(MODEL.lm, Unrecorded(2)), Rejection()) > ALPHA


def test_mean_accepted_is_the_expected_one_within_4_sigma():
    state = generate(MODEL, Rejection(), steps=1)
    accepted = np.asarray(state.stats.accepted) @ np.arange(3)
    expected = oracle.expected_accepted(exact(), context_tables(PARAMS["draft"], 2))
    assert 0.3 < expected < 1.9
    assert abs(accepted.mean() - expected) < 4 * accepted.std() / np.sqrt(ROWS)


@pytest.mark.slow
def test_greedy_rows_say_what_plain_greedy_says():
    """Beside sampled rows, and with a repetition penalty."""
    four = {"temperature": [0.0, 1.0, 0.0, 1.0], "repetition_penalty": [1.0, 1.0, 1.3, 1.0]}
    options = {name: np.tile(values, ROWS // 4) for name, values in four.items()}
    plain = np.asarray(generate(None, None, **options).tokens)
    got = np.asarray(generate(MODEL, Rejection(), **options).tokens)
    np.testing.assert_array_equal(got[::2, : len(PROMPT) + NEW], plain[::2, : len(PROMPT) + NEW])
    assert (got[1::2, : len(PROMPT) + NEW] != plain[1::2, : len(PROMPT) + NEW]).any()  # the rule is another one


# ---- planted faults: every check above is seen to fail ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Broken(Rejection):
    """A type and a name of its own, so that no program compiled for the right rule is reused."""

    fault: str = ""


def test_residual_without_its_clip_is_caught(monkeypatch):
    def unclipped(p, q, valid, accepted):
        here = accepted[:, None, None]
        proposed = jnp.pad(jnp.where(valid[:, :, None], q, 0.0), ((0, 0), (0, 1), (0, 0)))
        p_here = jnp.take_along_axis(p, here, axis=1)[:, 0]
        left = p_here - jnp.take_along_axis(proposed, here, axis=1)[:, 0]
        return jnp.where(left.sum(axis=-1, keepdims=True) > rejection.SMALLEST, left, p_here)

    monkeypatch.setattr(rejection, "residual", unclipped)
    rng = np.random.default_rng(2)
    assert enumeration_error(tables(rng, 3), tables(rng, 2), 2) > 1e-3


def test_accepting_at_equality_is_caught(monkeypatch):
    def loose(p, q, tokens, uniforms, valid):
        at = jnp.maximum(tokens, 0)[:, :, None]
        passes = uniforms * jnp.take_along_axis(q, at, axis=2)[..., 0] <= jnp.take_along_axis(p, at, axis=2)[..., 0]
        return jnp.cumprod((passes & valid).astype(jnp.int32), axis=1).sum(axis=1)

    monkeypatch.setattr(rejection, "count_accepted", loose)
    assert masked_token_passes()


@pytest.mark.slow
def test_a_draft_distribution_without_the_warpers_is_caught(monkeypatch):
    draft = jnp.asarray(PARAMS["draft"]["table"])

    def raw(tree, vocab):
        before = jnp.concatenate([jnp.full((tree.tokens.shape[0], 1), -1), tree.tokens[:, :-2]], axis=1)
        before = jnp.where(before < 0, PROMPT[-2], before)  # right at the first step, which suffices
        return jax.nn.softmax(draft[before, tree.tokens[:, :-1]], axis=-1)

    monkeypatch.setattr(rejection, "draft_probs", raw)
    assert sampled_p_value(MODEL, Broken("raw")) < ALPHA


@pytest.mark.slow
def test_a_bonus_without_temperature_is_caught(monkeypatch):
    right = rejection.residual

    def cold(p, q, valid, accepted):
        weights = right(p, q, valid, accepted)
        last = (accepted == q.shape[1])[:, None]
        return jnp.where(last, weights ** OPTIONS["temperature"], weights)

    monkeypatch.setattr(rejection, "residual", cold)
    assert sampled_p_value(MODEL, Broken("cold")) < ALPHA


# ---- edges ----------------------------------------------------------------------------------------------------------


@jax.jit
def judge(tree, logits, params):
    rows = logits.shape[0]
    keys = jax.random.split(jax.random.key(0), rows)
    sampler = Sampler(keys, jnp.zeros((rows, 8), int), jnp.full((rows,), 2), jnp.ones(rows, bool), params)
    return Rejection()(Output(delta=(), logits=logits), tree, sampler)


def test_broken_rows_fail_alone_and_invalid_proposals_are_plain_draws():
    offered = np.ones((5, 3), bool)
    offered[4, 1] = False
    tree = Tree.of(Topology.chain(2), jnp.asarray([[0, 1, 2]] * 5), jnp.asarray(offered))
    logits = np.full((5, 3, V), -40.0, np.float32)
    logits[:, 0, 1] = logits[:, 1, 2] = logits[:, 2, 3] = 0  # p is all but certain of the draft, then of token 3
    logits[1, 0, 0] = np.nan
    logits[2, 1] = -np.inf
    logits[3, 2, 0] = np.inf
    verdict = judge(tree, jnp.asarray(logits), SamplingArrays.make(5, temperature=[1.0, 1.0, 0.0, 1.0, 0.0]))
    assert verdict.accepted.tolist() == [2, 0, 1, 2, 0]
    assert verdict.next_token.tolist() == [3, -1, -1, -1, 1]
    assert verdict.path.tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1], [0, 1, 2], [0, -1, -1]]


@dataclasses.dataclass(frozen=True)
class Picky(Coupled):
    """A rule for drawn children alone."""

    judges = ("coupled", "iid")


def test_a_verifier_says_of_which_children_it_can_judge():
    Picky().check(ModelDrafter(MODEL.lm, Static()))
    for drafter in (PromptLookup(2), ModelDrafter(MODEL.lm, TopK()), ModelDrafter(MODEL.lm, Static(coupled=False))):
        Coupled().check(drafter)
        with pytest.raises(ValueError, match="Picky verifier cannot judge deterministic .* of coupled or iid"):
            specjax.speculative(TARGET, drafter, Picky())


def test_trees_are_refused():
    with pytest.raises(ValueError, match="chain"):
        specjax.speculative(TARGET, ModelDrafter(MODEL.lm, Static()), Rejection())
    bushy = ModelDrafter(MODEL.lm, TopK(k=2, depth=4, nodes=5))  # as many nodes as a chain of its depth
    with pytest.raises(ValueError, match="chain"):
        specjax.speculative(TARGET, bushy, Rejection())
    # a tree that reaches the verifier all the same is refused there
    with pytest.raises(ValueError, match="chain"):
        Rejection()(
            None, Tree.of(Topology((-1, 0, 0), (0, 0, 1)), jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool)), None
        )
