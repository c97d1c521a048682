"""Attention of unrolled passes: what the dense mask gives over all of their keys, of some queries at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.tree_attention import Unrolled, tree_attention, unrolled
from specjax.objectives.base import Batch

WIDTH, PASSES = 7, 3


def dense(visible):
    """`[2, T, 4 T]`: as the definition says, slot by slot."""
    first, later = np.asarray(visible.first), np.asarray(visible.later)
    mask = np.zeros((2, WIDTH, PASSES + 1, WIDTH), bool)
    mask[:, :, 0] = first
    for t in range(WIDTH):
        for r in range(1, PASSES + 1):
            if t - PASSES + r >= 0:
                mask[:, t, r, t - PASSES + r] = later[:, t, r - 1]
    return jnp.asarray(mask.reshape(2, WIDTH, -1))


@pytest.mark.parametrize("queries", [512, 3])
@pytest.mark.parametrize("options", [{}, {"window": 3, "soft_cap": 2.0, "sinks": True}], ids=["plain", "all"])
def test_unrolled_passes_are_a_mask_over_all_keys(options, queries, monkeypatch):
    monkeypatch.setattr(unrolled, "QUERIES", queries)
    documents = jnp.asarray([[0] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
    block = Batch(jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 8), bool), documents).pairs(PASSES)
    assert isinstance(block.visible, Unrolled)
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, WIDTH, 4, 8))
    key = jax.random.normal(keys[1], (2, WIDTH * (PASSES + 1), 2, 8))
    value = jax.random.normal(keys[2], (2, WIDTH * (PASSES + 1), 2, 6))
    told = options | ({"sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0])} if "sinks" in options else {})
    positions = jnp.tile(block.positions, (1, PASSES + 1))

    @functools.partial(jax.jit, static_argnums=0)
    def run(unrolling, query, key, value):
        def of(query, key, value):
            visible = block.visible if unrolling else dense(block.visible)
            return tree_attention(
                query, key, value, None, None, block.length, visible=visible, query_positions=block.positions,
                key_positions=positions, scale=8**-0.5, **told,
            )  # fmt: skip

        out, pull = jax.vjp(of, query, key, value)
        return out, pull(jnp.sin(out))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        run(True, query, key, value),
        run(False, query, key, value),
    )


def test_unrolled_passes_have_no_cache():
    block = Batch(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool)).pairs(1)
    x, cache = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 1, 4, 4))
    with pytest.raises(ValueError, match="reads no cache, and there is one"):
        tree_attention(x, x, x, cache, cache, block.length, visible=block.visible, scale=1.0)
