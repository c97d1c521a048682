"""Warpers against transformers' own classes and against the float64 oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.reference import trees
from specjax.reference import warpers as oracle
from specjax.sampling import Sampler, SamplingArrays, warp
from specjax.tree import Topology, Tree
from specjax.warpers import top_k_top_p
from specjax.warpers.ranking import reached

V = 500
WARPERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
warped_jit = jax.jit(lambda logits, params: warp(logits, params, jnp.ones(logits.shape[0], bool)))


def logits_of(kind, rng):
    z = rng.normal(size=V)
    if kind == "peaked":
        z = 6 * z
    elif kind == "flat":
        z = 1e-2 * z
    elif kind == "one_hot":
        z = np.where(np.arange(V) == rng.integers(V), 40.0, z)
    elif kind == "masked":
        z = np.where(rng.random(V) < 0.7, -np.inf, 3 * z)
    return z.astype(np.float32)


KINDS = ("random", "peaked", "flat", "one_hot", "masked")


def transformers_warp(logits, temperature, top_k, top_p, min_p):
    """The classes themselves, in the order of `GenerationMixin._get_logits_processor`."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.tensor(logits)[None]
    chain = [processors.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    chain += [processors.TopKLogitsWarper(top_k)] if top_k else []
    chain += [processors.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [processors.MinPLogitsWarper(min_p)] if min_p else []
    for processor in chain:
        scores = processor(None, scores)
    return scores[0].numpy()


def doubtful(logits, temperature, top_k, top_p, min_p):
    """Tokens so close to a cut that float32 rounding decides: within 1e-6 of the mass, or of the share."""
    scores = oracle.top_k(np.asarray(logits, np.float64) / temperature, top_k)
    out = np.zeros(len(scores), bool)
    if top_p < 1:
        out |= np.abs(oracle.mass_above(scores) - top_p) < 1e-6
        scores = oracle.top_p(scores, top_p)
    if min_p:
        chances = oracle.softmax(scores)
        out |= np.abs(chances - min_p * chances.max()) < 1e-6 * chances.max()
    return out


def check(logits, options):
    """`warp` of rows [B, V], each with its own options, equals transformers and the oracle; counts the doubtful."""
    params = SamplingArrays.make(len(logits), **{name: [o[name] for o in options] for name in WARPERS})
    got = np.asarray(warped_jit(jnp.asarray(logits)[:, None], params))[:, 0]
    skipped = 0
    for row, o in enumerate(options):
        sure = ~doubtful(logits[row], **o)
        skipped += (~sure).sum()
        want = transformers_warp(logits[row], **o)
        exact = oracle.warp(logits[row], o["temperature"], o["top_k"], o["top_p"], o["min_p"])
        for other in (want, exact):
            np.testing.assert_array_equal((got[row] == -np.inf)[sure], (other == -np.inf)[sure])
            both = np.isfinite(got[row]) & np.isfinite(other)
            np.testing.assert_allclose(got[row][both], other[both], rtol=1e-6)
        assert got[row].argmax() == logits[row].argmax()
    return skipped


GRID = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 499},
    {"top_k": 9999},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.8},
    {"top_k": 200, "min_p": 0.3},
]
GRID = [WARPERS | o for o in GRID]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_transformers(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    logits = np.stack([logits_of(kind, rng) for _ in GRID])
    assert check(logits, GRID) <= 0.001 * logits.size


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2**31),
    st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.2, 0.7, 1.0, 1.7]),
                "top_k": st.sampled_from([0, 1, 2, 5, 127, 128, 129, 400, 500]),
                "top_p": st.sampled_from([1e-3, 0.3, 0.5, 0.9, 0.99, 1.0]),
                "min_p": st.sampled_from([0.0, 1e-3, 0.1, 0.9]),
            }
        ),
        min_size=len(GRID),
        max_size=len(GRID),
    ),
)
def test_equal_to_transformers_whatever_the_options(seed, options):
    rng = np.random.default_rng(seed)
    check(np.stack([logits_of(KINDS[rng.integers(len(KINDS))], rng) for _ in options]), options)


@pytest.mark.parametrize(
    ("kind", "options", "searches"),
    [
        ("peaked", {"top_p": 0.9}, 0),
        ("random", {"top_k": 128}, 0),
        ("random", {"top_k": 129}, 1),
        ("flat", {"top_p": 0.9}, 1),
        ("flat", {"min_p": 0.5}, 0),
    ],
)
def test_the_whole_vocabulary_is_searched_only_where_the_cut_lies_beyond_the_ranked(
    kind, options, searches, monkeypatch
):
    ran = []
    inner = top_k_top_p._cut_searched

    def spy(*given):
        jax.debug.callback(lambda: ran.append("search"))
        return inner(*given)

    monkeypatch.setattr(top_k_top_p, "_cut_searched", spy)
    logits = np.stack([logits_of(kind, np.random.default_rng(5))] * 2)
    live = [True, True]
    fresh = jax.jit(lambda *arguments: warp(*arguments))

    def run(live, temperature):
        params = SamplingArrays.make(2, temperature=temperature, **options)
        out = fresh(jnp.asarray(logits)[:, None], params, jnp.asarray(live))
        jax.effects_barrier()
        return np.asarray(out)[:, 0]

    got = run(live, 1.0)
    assert len(ran) == searches
    o = WARPERS | options
    sure = ~doubtful(logits[0], **o)
    np.testing.assert_array_equal((got[0] > -np.inf)[sure], (transformers_warp(logits[0], **o) > -np.inf)[sure])
    ran.clear()
    run([False, False], 1.0)
    run(live, 0.0)
    assert not ran  # neither dead nor greedy rows pay for it


def test_greedy_rows_are_unchanged_beside_sampled_ones():
    logits = np.stack([logits_of(kind, np.random.default_rng(1)) for kind in KINDS])
    params = SamplingArrays.make(5, temperature=[0, 1, 0, 1, 0], top_k=3, top_p=0.5, min_p=0.2)
    got = np.asarray(warped_jit(jnp.asarray(logits)[:, None], params))[:, 0]
    np.testing.assert_array_equal(got[::2], logits[::2])
    assert (np.isfinite(got[1::2]).sum(axis=1) <= 3).all() and (got[1::2] == -np.inf).any()


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_what_reaches_a_share_is_what_a_sort_finds(spread):
    """In double precision, of values of both signs, zeros, ties and removed ones."""
    rng = np.random.default_rng(7)
    values = np.round(rng.normal(size=(6, 5000)) * spread, 2).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = -np.inf
    mass = np.where(values > -np.inf, rng.random(values.shape), 0.0).astype(np.float32)
    mass /= mass.sum(axis=1, keepdims=True)
    share = np.asarray([0.01, 0.3, 0.5, 0.9, 0.999, 1.1], np.float32)
    got = np.asarray(jax.jit(reached)(values, mass, share))
    for row in range(6):
        order = np.argsort(-values[row], kind="stable")
        enough = np.cumsum(mass[row, order], dtype=np.float64) >= share[row]
        want = values[row, order[np.argmax(enough)]] if enough.any() else -np.inf
        assert got[row] == want
    counted = np.asarray(reached(jnp.asarray(values), 1.0, jnp.asarray([1, 2, 700, 4500, 5000, 5001], jnp.float32)))
    ranked = -np.sort(-values, axis=1)
    assert counted.tolist() == [*(ranked[i, n - 1] for i, n in enumerate((1, 2, 700, 4500, 5000))), -np.inf]


def test_ties_at_the_cut_are_all_kept():
    logits = jnp.zeros((3, 1, V)).at[:, 0, 7].set(1.0)
    params = SamplingArrays.make(3, temperature=1.0, top_k=[3, 0, 1], top_p=[1.0, 0.5, 1.0])
    kept = np.isfinite(np.asarray(warped_jit(logits, params))[:, 0]).sum(axis=1)
    assert kept.tolist() == [V, V, 1]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_transformers(penalty):
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(2)
    tokens, lengths = rng.integers(0, V, (4, 30)), np.array([1, 30, 12, 5])
    logits = np.stack([logits_of(kind, rng) for kind in KINDS[:4]])
    logits[3, tokens[3, :3]] = -np.inf
    params, keys = SamplingArrays.make(4, repetition_penalty=penalty), jax.random.split(jax.random.key(0), 4)
    sampler = Sampler(keys, jnp.asarray(tokens), jnp.asarray(lengths), jnp.ones(4, bool), params)
    got = np.asarray(sampler.penalised(jnp.asarray(logits)[:, None]))[:, 0]
    for row in range(4):
        text = tokens[row, : lengths[row]]
        want = processors.RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor(text)[None], torch.tensor(logits[row])[None]
        )
        np.testing.assert_allclose(got[row], want[0].numpy(), rtol=1e-6)
        np.testing.assert_allclose(got[row], oracle.repetition_penalty(logits[row], text, penalty), rtol=1e-6)


def test_in_a_tree_every_node_pays_for_its_own_path():
    rng = np.random.default_rng(3)
    vocab, topology = 12, Topology.from_counts("3 | 2 1 | 1 1")
    nodes = len(topology.parents)
    text, lengths = rng.integers(0, vocab, (3, 10)), np.array([2, 10, 4])
    penalties = np.array([1.5, 0.7, 1.0])
    drafted = rng.integers(0, vocab, (3, nodes))
    drafted[:, 0] = text[np.arange(3), lengths - 1]
    offered = np.ones((3, nodes), bool)
    offered[0, 4] = False
    tree = Tree.of(topology, jnp.asarray(drafted), jnp.asarray(offered))
    logits = rng.normal(size=(3, nodes, vocab)).astype(np.float32)
    sampler = Sampler(
        jax.random.split(jax.random.key(0), 3),
        jnp.asarray(text),
        jnp.asarray(lengths),
        jnp.ones(3, bool),
        SamplingArrays.make(3, repetition_penalty=penalties),
    )
    got = np.asarray(sampler.penalised(jnp.asarray(logits), tree.path_tokens))
    for row in range(3):
        for node in range(nodes):
            path = [int(t) for t in np.asarray(tree.tokens)[row, trees.path_to(topology.parents, node)] if t >= 0]
            seen = text[row, : lengths[row]].tolist() + path
            want = oracle.repetition_penalty(logits[row, node], seen, penalties[row])
            np.testing.assert_allclose(got[row, node], want, rtol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": np.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": [0.5, 2]},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("nan")},
    ],
)
def test_bad_options_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingArrays.make(2, **bad)


def test_traced_values_go_into_columns():
    """`make` checks numbers, which a traced value has not; a column takes any array, and rows are drawn as it says."""
    for traced in (lambda t: SamplingArrays.make(2, temperature=t), lambda t: SamplingArrays.make(1, temperature=[t])):
        with pytest.raises(ValueError, match=r"temperature is traced.*SamplingArrays.replace\(temperature="):
            jax.vmap(traced)(jnp.ones(3))
    logits, temperatures = jnp.arange(4.0)[None, None], jnp.array([0.5, 2.0])
    params = SamplingArrays.make(1, temperature=1.0)
    warped = jax.vmap(lambda t: warp(logits, params.replace(temperature=t[None]), jnp.ones(1, bool)))(temperatures)
    np.testing.assert_allclose(warped[:, 0, 0], [[0, 2, 4, 6], [0, 0.5, 1, 1.5]])
