"""Rules that go down a tree keep the target's distribution: by enumeration, by counting on the real path, seen to fail
when broken."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA, MODEL, PARAMS, ROWS, V, context_tables, exact, generate, sampled_p_value, tables
from support.forests import accepted, distribution_error

import specjax
from specjax.draft import ModelDrafter, PromptLookup, TokenRecycling
from specjax.expand import IID, Chain, GreedyDraft, Static, TopK, WithoutReplacement
from specjax.lm import Output
from specjax.sampling import Sampler, SamplingArrays
from specjax.tree import Topology, Tree
from specjax.verify import GreedyMulti, KSeq, MultiStep, Recursive, RecursiveWOR, Rejection, Traversal, k_seq, traversal
from specjax.verify.bounds import greedy_acceptance, optimal_acceptance
from specjax.verify.top_down import TakenAsTheyAre, at, where

TREE = Topology.from_counts("2 | 1 2")
RULES = {
    "recursive": (Recursive(), "iid"),
    "k_seq": (KSeq(), "iid"),
    "recursive_wor": (RecursiveWOR(), "without_replacement"),
    "greedy_multi": (GreedyMulti(), "greedy"),
    "as_they_are": (TakenAsTheyAre(), "deterministic"),
    "traversal": (Traversal(), "without_replacement"),
    "traversal_as_they_are": (Traversal(), "deterministic"),
}
"""`multi_step` is `recursive` in other orders."""


def small(rng, kinds, depth=2, vocab=3):
    """Distributions of the target and of the draft over three tokens."""
    p, q = (
        [dist[(slice(0, vocab),) * dist.ndim] + 0 for dist in tables(rng, depth + more, kind)]
        for more, kind in zip((1, 0), kinds, strict=True)
    )
    share = lambda dist: dist / np.where(dist.sum(-1, keepdims=True) > 0, dist.sum(-1, keepdims=True), 1)
    fill = lambda dist: np.where(dist.sum(-1, keepdims=True) > 0, dist, 1.0)
    return [share(fill(dist)) for dist in p], [share(fill(dist)) for dist in q]


# ---- by enumeration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_the_joint_distribution_is_the_targets_to_1e12(name):
    rule, children = RULES[name]
    for seed, kinds in enumerate(itertools.product(("full", "sparse", "one_hot"), repeat=2)):
        p, q = small(np.random.default_rng(seed), kinds)
        assert distribution_error(rule, TREE, p, q, children) < 1e-12, kinds
    assert distribution_error(rule, TREE, p, p[:-1], children) < 1e-12


SHAPES = [
    Topology(parents, tuple(parents[:n].count(parent) if n else 0 for n, parent in enumerate(parents)))
    for count in (1, 2, 3)
    for parents in ((-1, *below) for below in itertools.product(*(range(node) for node in range(1, count + 1))))
]
"""Every tree of at most three drafted nodes, in every order of its nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_small_shape(name):
    rule, children = RULES[name]
    assert len(SHAPES) == 1 + 2 + 6
    p, q = small(np.random.default_rng(5), ("full", "sparse"), depth=3)
    for topology in SHAPES:
        depth = max(topology.depths)
        assert distribution_error(rule, topology, p[: depth + 1], q[:depth], children) < 1e-12, topology


def test_any_order_keeps_the_distribution():
    """What `multi_step` draws of: siblings in every order, levels one after the other."""
    p, q = small(np.random.default_rng(1), ("full", "full"))
    for first, last in itertools.product(itertools.permutations((1, 2)), itertools.permutations((3, 4, 5))):
        assert distribution_error(MultiStep(), TREE, p, q, "iid", (*first, *last)) < 1e-12


@pytest.mark.slow
def test_equal_children_are_one_place():
    """The children of both are tried, also those of the one that was not gone to, and the distribution stays."""
    one, two = (Topology.from_counts(f"2 | {counts}") for counts in ("0 2", "1 0"))
    p, q = small(np.random.default_rng(3), ("full", "full"))
    for topology, (rule, children) in itertools.product((one, two), RULES.values()):
        assert distribution_error(rule, topology, p, q, children) < 1e-12
    sure = [np.broadcast_to(np.eye(3)[0], dist.shape) for dist in q]
    assert accepted(Recursive(), one, [*sure, p[-1]], sure, "iid") == 2  # the first of two equal ones is a leaf


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_at_a_node(k):
    """None beats the optimum that a linear program confirms; one child is the ordinary test; each rule's own formula."""
    star = Topology.from_counts(str(k))
    for seed in range(3):
        p, q = small(np.random.default_rng(seed), ("full", "full"), depth=1)
        best = [optimal_acceptance(p[0], q[0], k, replacement=again) for again in (True, False)]
        got = {name: accepted(rule, star, p, q, children) for name, (rule, children) in RULES.items()}
        assert max(got["recursive"], got["k_seq"]) <= best[0] + 1e-9 and got["recursive_wor"] <= best[1] + 1e-9
        assert got["k_seq"] >= (1 - (1 - 1 / k) ** k) * best[0] - 1e-9
        with jax.enable_x64(True):
            r = float(k_seq.factor(jnp.asarray(p[0])[None], jnp.asarray(q[0])[None], jnp.full((1,), float(k)))[0])
        assert got["k_seq"] == pytest.approx(np.minimum(p[0], r * q[0]).sum(), abs=1e-7)
        assert got["greedy_multi"] == pytest.approx(greedy_acceptance(p[0], q[0], k), abs=1e-12)
        if k == 1:
            drawn = [got[name] for name in ("recursive", "k_seq", "recursive_wor", "greedy_multi")]
            np.testing.assert_allclose(drawn, np.minimum(p[0], q[0]).sum(), atol=1e-12)
        if k == 3:
            assert got["recursive_wor"] == pytest.approx(1, abs=1e-12)  # every token is there
        assert got["recursive_wor"] >= got["recursive"] - 1e-12


def test_traversal_keeps_at_least_as_many_as_the_way_down():
    gains = []
    for seed in range(4):
        p, q = small(np.random.default_rng(seed), ("full", "full"))
        rules = (Traversal(), "without_replacement"), (RecursiveWOR(), "without_replacement")
        up, down = (accepted(rule, TREE, p, q, children) for rule, children in rules)
        gains.append(up - down)
    assert min(gains) > -1e-12 and max(gains) > 0.005


def test_traversal_of_a_chain_is_block_verification():
    """The example of that paper: two tokens of p = (1/3, 2/3) and q = (2/3, 1/3), of which 11/9 are kept."""
    widen = lambda dist, i: np.broadcast_to([*dist, 0.0], (3,) * i + (3,))
    p, q = ([widen(dist, i) for i in range(n)] for dist, n in (((1 / 3, 2 / 3), 3), ((2 / 3, 1 / 3), 2)))
    chain = Topology.chain(2)
    assert accepted(Traversal(), chain, p, q, "without_replacement") == pytest.approx(11 / 9, abs=1e-12)
    assert accepted(RecursiveWOR(), chain, p, q, "without_replacement") == pytest.approx(10 / 9, abs=1e-12)


def test_a_sharp_draft_distribution_is_kept_beyond_float32():
    """What is left below the likeliest token is e-100 of q, and the second child is still drawn from that."""
    log_q = jnp.log(jnp.asarray([[0.0, 0.3, 0.7]])).at[0, 0].set(100.0)
    log_q = jax.nn.log_softmax(log_q)
    p = jnp.asarray([[0.2, 0.4, 0.4]])
    state = RecursiveWOR().rejected(RecursiveWOR().enter(p, log_q, None), jnp.asarray([0]))
    chances = [float(RecursiveWOR().chance(state, jnp.asarray([token]))[0]) for token in (1, 2)]
    np.testing.assert_allclose(chances, [1, 0.5 / 0.7], rtol=1e-5)


# ---- planted faults ---------------------------------------------------------------------------------------------------


class Unchanged(Recursive):
    """Goes on with p as it was."""

    def rejected(self, state, tokens):
        return state


class Replaced(RecursiveWOR):
    """Leaves what was rejected in q."""

    def rejected(self, state, tokens):
        return super().rejected(state, tokens)[0], state[1]


class Greedy(KSeq):
    """r = 1, below what k drafts may have."""

    def enter(self, p, log_q, count):
        return p, jnp.exp(log_q), jnp.maximum(p - jnp.exp(log_q), 0) + 1e-30


class Unmoved(GreedyMulti):
    """Looks for a draw from p among the likeliest, not from what is left of it."""

    def rejected(self, state, tokens):
        drawn = at(state[1], tokens) > -jnp.inf
        return where(drawn, state, super().rejected(state, tokens))


class Forgetful(TakenAsTheyAre):
    """What was rejected may still be drawn."""

    def rejected(self, state, tokens):
        return state


@pytest.mark.parametrize(
    ("rule", "children"),
    [
        (Unchanged(), "iid"),
        (Replaced(), "without_replacement"),
        (Greedy(), "iid"),
        (Unmoved(), "greedy"),
        (Forgetful(), "deterministic"),
        (Recursive(), "without_replacement"),  # a right rule for other children: why a verifier says what it can judge
        (RecursiveWOR(), "iid"),
        (GreedyMulti(), "without_replacement"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_faults_are_caught(rule, children):
    p, q = small(np.random.default_rng(0), ("full", "full"))
    assert distribution_error(rule, TREE, p, q, children) > 1e-3


class Careless(Traversal):
    """A type of its own, so that no program compiled for the right rule is reused."""


def test_a_parent_that_forgets_its_children_is_caught(monkeypatch):
    right = traversal.after
    monkeypatch.setattr(traversal, "after", lambda weight, *others: (weight, right(weight, *others)[1]))
    p, q = small(np.random.default_rng(0), ("full", "full"))
    assert distribution_error(Careless(), TREE, p, q, "without_replacement") > 1e-3


# ---- by counting on the real path -----------------------------------------------------------------------------------

SHAPE = "2 | 1 2"
DRAFT = {
    "iid": IID(tree=SHAPE),
    "without_replacement": WithoutReplacement(tree=SHAPE),
    "coupled": Static.from_counts(SHAPE),
    "greedy": GreedyDraft(tree=SHAPE),
}
REAL = [
    ("multi_step", MultiStep(), "iid"),
    ("recursive", Recursive(), "iid"),
    ("k_seq", KSeq(), "iid"),
    ("recursive_wor", RecursiveWOR(), "without_replacement"),
    ("recursive_wor", RecursiveWOR(), "coupled"),
    ("traversal", Traversal(), "without_replacement"),
    ("greedy_multi", GreedyMulti(), "greedy"),
]


@pytest.mark.parametrize(
    ("name", "verifier", "children"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != "multi_step")) for case in REAL],
)
def test_the_jitted_decoder_accepts_as_many(name, verifier, children):
    """The mean accepted number is within 4 sigma of the enumerated one; `tests/guarantees/` has the distribution of the
    texts."""
    drafter = ModelDrafter(MODEL.lm, DRAFT[children])
    kept = np.asarray(generate(drafter, verifier, steps=1).stats.accepted) @ np.arange(3)
    dists = exact(), context_tables(PARAMS["draft"], 2)
    drawn = "without_replacement" if children == "coupled" else children
    orders = [None]
    if name == "multi_step":
        orders = [
            (*a, *b)
            for a in ((1, 2), (2, 1))
            for b in ((3, 4, 5), (3, 5, 4), (4, 3, 5), (4, 5, 3), (5, 3, 4), (5, 4, 3))
        ]
    expected = np.mean([accepted(verifier, DRAFT[children].topology, *dists, drawn, order) for order in orders])
    assert abs(kept.mean() - expected) < 4 * kept.std() / np.sqrt(ROWS)


@dataclasses.dataclass(frozen=True)
class Ordered(IID):
    """Siblings in the order of their tokens, not of their draws."""

    def drawn(self, scores, sampler, depth, counts):
        return jnp.sort(super().drawn(scores, sampler, depth, counts), axis=2)


@pytest.mark.slow
def test_siblings_that_are_sorted_afterwards_are_caught():
    assert sampled_p_value(ModelDrafter(MODEL.lm, Ordered(tree=SHAPE)), Recursive()) < ALPHA


# ---- edges ----------------------------------------------------------------------------------------------------------


@jax.jit
def both(tree, logits, params):
    rows = logits.shape[0]
    keys = jax.random.split(jax.random.key(0), rows)
    sampler = Sampler(keys, jnp.zeros((rows, 8), int), jnp.full((rows,), 2), jnp.ones(rows, bool), params)
    return [rule(Output(delta=(), logits=logits), tree, sampler) for rule in (Recursive(), MultiStep(), KSeq())]


@pytest.mark.slow
def test_broken_rows_fail_alone_and_what_is_not_offered_is_not_taken():
    topology = Topology.from_counts("2 | 0 1")
    tokens = jnp.asarray([[0, 3, 1, 2]] * 5)
    offered = np.ones((5, 4), bool)
    offered[4, 2] = False  # and so what is below it
    log_q = jnp.log(jnp.full((5, 4, V), 1 / V))
    tree = Tree.of(topology, tokens, jnp.asarray(offered), log_q=log_q, children="iid")
    logits = np.full((5, 4, V), -40.0, np.float32)
    logits[:, 0, 1] = logits[:, 2, 2] = logits[:, 3, 3] = 0  # p is all but certain of 1, 2, 3
    logits[1, 0, 0] = np.nan
    logits[2, 2] = -np.inf
    logits[3, 3, 0] = np.inf
    for verdict in both(tree, jnp.asarray(logits), SamplingArrays.make(5, temperature=[1.0, 1.0, 0.0, 1.0, 0.0])):
        assert verdict.accepted.tolist() == [2, 0, 1, 2, 0]
        assert verdict.next_token.tolist() == [3, -1, -1, -1, 1]
        assert verdict.path.tolist() == [[0, 2, 3], [0, -1, -1], [0, 2, -1], [0, 2, 3], [0, -1, -1]]


def test_what_fits():
    """One clear error for what does not; chains of drawn tokens are for all."""
    lm = MODEL.lm
    for rule in (MultiStep(), Recursive(), KSeq(), RecursiveWOR(), GreedyMulti()):
        for drafter in (
            PromptLookup(2),
            ModelDrafter(lm, Chain(2)),
            ModelDrafter(lm, TopK()),
            ModelDrafter(lm, IID(k=1)),
        ):
            rule.check(drafter)
        with pytest.raises(ValueError, match="with this one a row's text would depend on the other rows"):
            rule.check(TokenRecycling())
    for rule in (MultiStep(), Recursive(), KSeq()):
        for expander in (Static(), WithoutReplacement(), GreedyDraft()):
            with pytest.raises(
                ValueError, match="cannot judge (coupled|without_replacement|greedy) .* of deterministic or iid"
            ):
                specjax.speculative(lm, ModelDrafter(lm, expander), rule)
    with pytest.raises(ValueError, match="the recursive_wor verifier cannot judge iid children"):
        specjax.speculative(lm, ModelDrafter(lm, IID()), RecursiveWOR())
    with pytest.raises(ValueError, match="the rejection verifier takes chains|cannot judge"):
        specjax.speculative(lm, ModelDrafter(lm, IID()), Rejection())
