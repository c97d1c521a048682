"""SpAtten's reads and heads, against loops in numpy and what its hardware decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed
from support.small_target import TARGET

from specjax.kernels.tree_attention import tree_attention
from specjax.models.caches import SpAtten
from specjax.models.caches.spatten_reads import Reads, cascade, flat, in_bits, largest

B, K, G, H, T, S, P = 2, 2, 2, 4, 3, 9, 2
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def case():
    """The arguments of `tree_attention`: a block with ancestors over slots, some of them unseen."""
    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
    own = draw(B, P + T, K, H), draw(B, P + T, K, H)
    visible = jnp.asarray(RNG.random((B, T, P + T)) < 0.6).at[:, :, 0].set(True)
    unseen = jnp.asarray(RNG.random((B, S)) < 0.3)
    args = draw(B, T, K * G, H) * 2, *own, draw(B, K, S, H), draw(B, K, S, H), jnp.full((B,), S)
    return args, {"visible": visible, "unseen": unseen, "scale": 0.5}


def rounded(x, bits, more, high):
    top = 2 ** (bits + more - 1) - 1
    step = np.abs(x).max() / top
    codes = np.round(x / step).astype(int)
    return (codes // 2**more * 2**more if high else codes) * step


def slowly(args, options, reads, sinks=None):
    """`[B, T, N, H]`, key by key, and how many queries read the low bits."""
    query, key, value, cache_key, cache_value, _ = (np.asarray(x, np.float64) for x in args)
    out, again = np.zeros(query.shape), 0
    for b, t, n in np.ndindex(*query.shape[:3]):
        k = n // G
        slots = [s for s in range(S) if not options["unseen"][b, s]]
        owns = [i for i in range(key.shape[1]) if options["visible"][b, t, i]]
        keys = [*(cache_key[b, k, s] for s in slots), *(key[b, i, k] for i in owns)]
        values = [*(cache_value[b, k, s] for s in slots), *(value[b, i, k] for i in owns)]

        def weigh(kept, b=b, t=t, n=n, keys=keys):
            scores = np.array([kept(x) @ query[b, t, n] * options["scale"] for x in keys])
            extra = [] if sinks is None else [float(sinks[n])]
            weights = np.exp(scores) / np.exp([*scores, *extra]).sum()
            return weights

        weights = weigh(lambda x: rounded(x, reads.bits, reads.more, True) if reads.bits else x)
        if reads.bits and weights.max() < reads.threshold:
            again += 1
            weights = weigh(lambda x: rounded(x, reads.bits, reads.more, False))
        most = max(int(reads.values * len(keys) + 1e-4), 1)
        for i in sorted(range(len(keys)), key=lambda i: -weights[i])[:most]:
            out[b, t, n] += weights[i] * values[i]
        if reads.live is not None and not reads.live[b, k, 0]:
            out[b, t, n] = 0
    return out, again


LIVE = jnp.asarray([[[True], [False]], [[True], [True]]])


@pytest.mark.parametrize(
    "reads",
    [
        Reads(),
        pytest.param(Reads(LIVE), marks=pytest.mark.slow),
        pytest.param(Reads(values=0.4), marks=pytest.mark.slow),
        pytest.param(Reads(bits=4, more=3, threshold=0.5), marks=pytest.mark.slow),
        Reads(LIVE, 0.5, 3, 2, 0.4),
    ],
    ids=["whole", "heads", "values", "bits", "all"],
)
def test_a_query_reads_what_loops_say(case, reads):
    args, options = case
    want, again = slowly(args, options, reads)
    got = jax.jit(lambda *args: tree_attention(*args, **options, implementation=reads))(*args)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert not reads.bits or 0 < again < B * T * K * G
    whole = tree_attention(*args, **options, implementation="xla")
    assert np.allclose(got, whole, atol=1e-5) == (reads == Reads())


@pytest.mark.slow
def test_a_sink_takes_part(case):
    args, options = case
    sinks = jnp.asarray(RNG.normal(size=K * G), jnp.float32)
    reads = Reads(values=0.5, bits=4, threshold=0.3)
    got = tree_attention(*args, **options, sinks=sinks, implementation=reads)
    np.testing.assert_allclose(got, slowly(args, options, reads, sinks)[0], atol=2e-5)


def test_low_bits_are_read_where_no_weight_is_large():
    """The hardware's decision: the largest weight is below the threshold. So a flat row of more than 20 places at .05."""
    rows = jnp.stack(
        [jnp.eye(30)[3], jnp.full(30, 1 / 30), jnp.zeros(30).at[:20].set(0.05), jnp.zeros(30).at[:21].set(1 / 21)]
    )
    assert flat(rows, 0.05)[:, 0].tolist() == [False, True, False, True]
    assert not flat(rows, 0.0).any()


def test_bits_are_halves_of_the_same_code():
    """High and low bits add up to the whole code; the whole differs from the key by half a step at most."""
    x = jnp.asarray(RNG.normal(size=(5, 7)), jnp.float32)
    step = np.abs(x).max(axis=1, keepdims=True) / (2**11 - 1)
    whole, high = in_bits(x, 8, 4), in_bits(x, 8, 4, high=True)
    low = np.round((whole - high) / step)
    assert ((low >= 0) & (low < 16)).all() and len(np.unique(low)) > 5
    assert (np.abs(whole - x) <= 0.5001 * step).all() and np.abs(whole - x).max() > 0.2 * step.min()
    np.testing.assert_array_equal(in_bits(x, 12, 0), in_bits(x, 12, 0, high=True))


def test_how_many_values_are_read():
    """As in the published table of GPT-2 medium: 307 of 1,024 and so on."""
    whole = RNG.dirichlet(np.ones(1024)).astype(np.float32)
    read = jax.jit(lambda weights, seen: largest(weights, 0.3, seen))
    for live, count in {1024: 307, 921: 276, 819: 245, 614: 184, 307: 92}.items():
        weights = np.where(np.arange(1024) < live, whole, 0.0)
        kept = np.asarray(read(weights, jnp.asarray([live])))
        assert (kept > 0).sum() == count and kept[kept > 0].min() >= weights[kept == 0].max()


def test_the_error_of_values_left_out_is_bounded(case):
    args, options = case
    whole, part = (tree_attention(*args, **options, implementation=r) for r in (Reads(), Reads(values=0.5)))
    ones = (*args[:2], jnp.ones_like(args[2]), args[3], jnp.ones_like(args[4]), args[5])
    dropped = 1 - tree_attention(*ones, **options, implementation=Reads(values=0.5))
    largest_value = max(float(jnp.abs(args[i]).max()) for i in (2, 4))
    assert (np.abs(whole - part) <= dropped * largest_value + 1e-5).all() and dropped.max() > 0.05


def test_heads_live_in_a_cascade():
    """Nested, of those that gave most in lower layers and earlier, by a count in Python."""
    counts, layers = [4, 3, 2, 1], 4
    before, totals = [jnp.zeros((1, 4))] * layers, np.zeros((layers, 4))
    for _ in range(3):
        spoke = [jnp.asarray(RNG.random((1, 4)), jnp.float32) for _ in range(layers)]
        found = cascade(counts, before, spoke)
        below, brought = set(range(4)), np.zeros(4)
        for i, (total, live) in enumerate(found):
            totals[i] += brought
            below = set(sorted(below, key=lambda head, i=i: -totals[i, head])[: counts[i]])
            assert set(np.flatnonzero(live[0])) == below
            np.testing.assert_allclose(total[0], totals[i], rtol=1e-5)
            brought = brought + np.array([float(spoke[i][0, head]) * (head in below) for head in range(4)])
        before = [total for total, _ in found]


def config_of(layers=3):
    return changed(
        TARGET.config, num_hidden_layers=layers, num_attention_heads=K * G, num_key_value_heads=K, head_dim=H
    )


def test_what_a_step_would_read():
    """All fields off: the tokens kept, of both; then as in the published table, heads in groups."""
    config = config_of()
    assert SpAtten(chunk=4, recent=4, important=64, last=64).reads(config, 40) == (40 * K * H * 32 * 3,) * 2
    policy = SpAtten(chunk=4, recent=4, important=12, last=4, heads=0.5, values=0.5, bits=8, more=4)
    seen, heads = (4 + 12, 4 + 8, 4 + 4), (2, 2, 1)
    count = lambda key: sum(n * H * (s * key + s // 2 * 16) for s, n in zip(seen, heads, strict=True))
    assert policy.reads(config, 40) == (40 * K * H * 32 * 3, count(12))
    assert policy.reads(config, 40, low=0.0)[1] == count(8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"heads": 0.0}, "heads and values in"),
        ({"values": 1.5}, "heads and values in"),
        ({"bits": 1}, "bits of 0 or from 2 on"),
        ({"bits": 12, "more": 5}, "at most 16 of both"),
        ({"threshold": -0.1}, "threshold >= 0"),
    ],
)
def test_fields_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        SpAtten(**fields)


def test_distances_are_refused(case):
    args, options = case
    at = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, P + T), jnp.int32)
    with pytest.raises(ValueError, match="adds numbers for distances"):
        tree_attention(
            *args, **options, query_positions=at[0], key_positions=at[1], distances=jnp.zeros((K * G, 9)),
            implementation=Reads(values=0.5),
        )  # fmt: skip


def test_only_what_is_asked_for_is_there():
    plain, whole = SpAtten(), SpAtten(heads=0.5)
    bodies = [policy.init(config_of(), 1, B, 64, jnp.float32) for policy in (plain, whole)]
    assert bodies[0].live is None and plain.attend(bodies[0]) is None
    assert bodies[1].live.all() and whole.attend(bodies[1]) == dataclasses.replace(Reads(), live=bodies[1].live)
