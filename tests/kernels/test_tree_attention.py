"""Tree attention: the blocked way against the one in one piece, and what must never matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.tree_attention import blocked, tree_attention

B, T, K, G, H = 3, 5, 2, 2, 8
attend = jax.jit(tree_attention, static_argnames=("causal", "scale", "window", "implementation"))
plain = functools.partial(attend, scale=H**-0.5)


def world(capacity, lengths, past=0, dtype=jnp.float32, seed=0):
    """Operands with finite garbage beyond the lengths, and the options that place them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    operands = draw(B, T, K * G, H), draw(B, past + T, K, H), draw(B, past + T, K, H)
    cache = draw(B, K, capacity, H) * 3, draw(B, K, capacity, H) * 3
    length = jnp.asarray(lengths, jnp.int32)
    positions = length[:, None] + jnp.arange(past + T)[None]
    visible = jnp.asarray(rng.random((B, T, past + T)) < 0.6) | jnp.eye(T, past + T, past, dtype=bool)[None]
    return (*operands, *cache, length), {
        "visible": visible, "query_positions": positions[:, past:], "key_positions": positions,
    }  # fmt: skip


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(
    ("capacity", "lengths", "past"),
    [
        (300, (0, 129, 300), 0),
        (128, (1, 128, 64), 2),
        (40, (0, 0, 0), 1),
        (40, (3, 40, 17), 0),
        (260, (260, 5, 131), 3),
    ],
)
def test_blocks_are_the_whole(capacity, lengths, past, window):
    operands, options = world(capacity, lengths, past)
    whole = plain(*operands, **options, window=window, implementation="xla")
    blocks = plain(*operands, **options, window=window, implementation="blocked")
    np.testing.assert_allclose(blocks, whole, rtol=2e-5, atol=2e-6)


def test_the_mask_of_a_chain_and_none():
    operands, _ = world(200, (10, 150, 199))
    for causal in (True, False):
        whole, blocks = (plain(*operands, causal=causal, implementation=kind) for kind in ("xla", "blocked"))
        np.testing.assert_allclose(blocks, whole, rtol=2e-5, atol=2e-6)


def test_neither_capacity_nor_other_rows_nor_garbage_change_a_bit():
    (query, key, value, cache_key, cache_value, _), options = world(5 * blocked.BLOCK, (20, 130, 390))
    run = functools.partial(plain, **options, implementation="blocked")
    want = run(query, key, value, cache_key, cache_value, jnp.asarray([20, 130, 390]))
    for capacity in (4 * blocked.BLOCK, 5 * blocked.BLOCK):
        for others in (0, 130, 390, 512):
            cut = [x[:, :, :capacity].at[1, :, 130:].set(1e9) for x in (cache_key, cache_value)]
            got = run(query, key, value, *cut, jnp.asarray([others, 130, others]))
            np.testing.assert_array_equal(got[1], want[1])


def test_half_precision_stays_close():
    operands, options = world(300, (0, 129, 300), dtype=jnp.bfloat16)
    exact = plain(*(x.astype(jnp.float32) for x in operands[:5]), operands[5], **options, implementation="xla")
    got = plain(*operands, **options, implementation="blocked")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=0.05)


def test_a_query_that_sees_nothing_gets_zeros():
    operands, options = world(40, (0, 3, 40))
    options["visible"] = options["visible"].at[0, 2].set(False)
    for kind in ("xla", "blocked"):
        out = plain(*operands, **options, implementation=kind)
        assert (out[0, 2] == 0).all() and bool(jnp.isfinite(out).all())


def test_only_used_blocks_are_read():
    """NaN in the blocks beyond the longest row would show: 0 times NaN is NaN."""
    operands, options = world(4 * blocked.BLOCK, (1, 100, blocked.BLOCK))
    spoilt = [x.at[:, :, blocked.BLOCK :].set(jnp.nan) for x in operands[3:5]]
    out = plain(*operands[:3], *spoilt, operands[5], **options, implementation="blocked")
    assert bool(jnp.isfinite(out).all())
    out = plain(*operands[:3], *spoilt, operands[5] + blocked.BLOCK, **options, implementation="blocked")
    assert not bool(jnp.isfinite(out).all())


def test_the_default_is_blocked_for_a_cache_here():
    operands, options = world(300, (0, 129, 300))
    np.testing.assert_array_equal(plain(*operands, **options), plain(*operands, **options, implementation="blocked"))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["blocked", None])
def test_all_ways_have_one_gradient(kind, window):
    """Under jit, of everything that can be differentiated: queries, own keys and values, and the cache."""
    operands, options = world(300, (0, 129, 300))

    def gradients(kind):
        loss = lambda *floats: (plain(*floats, operands[5], **options, window=window, implementation=kind) ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=range(5)))(*operands[:5])

    for got, want in zip(gradients(kind), gradients("xla"), strict=True):
        assert float(jnp.abs(want).max()) > 0
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_without_a_cache_it_can_be_differentiated():
    (query, key, value, *_, length), _ = world(40, (0, 3, 40))
    loss = lambda query: tree_attention(query, key, value, None, None, length, scale=1.0).sum()
    assert bool(jnp.isfinite(jax.grad(loss)(query)).all())


def test_bad_implementations():
    (query, key, value, *_, length), _ = world(40, (0, 3, 40))
    with pytest.raises(ValueError, match="no implementation 'frob'; choose 'xla', 'blocked' or None"):
        tree_attention(query, key, value, None, None, length, scale=1.0, implementation="frob")
    with pytest.raises(ValueError, match="there is none"):
        tree_attention(query, key, value, None, None, length, scale=1.0, implementation="blocked")
