"""Products of rows sorted by group: those of groups that have rows, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.grouped import grouped_dot
from specjax.sharding import make_mesh

X, E, F = 7, 5, 6
SIZES = (
    (1, 0, 0, 0, 0, 0, 0),
    (0, 0, 3, 0, 0, 0, 1),
    (0, 40, 0, 1, 9, 0, 0),
    (5, 6, 7, 8, 9, 10, 11),
    (0, 0, 0, 0, 0, 0, 150),
)


def made(sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), E)).astype(np.float32)
    return x, rng.normal(size=(X, E, F)).astype(np.float32), np.asarray(sizes, np.int32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_a_product_a_row_and_reads_no_empty_group(sizes):
    x, kernels, counts = made(sizes)
    want = np.stack([row @ kernels[group] for row, group in zip(x, np.repeat(np.arange(X), counts), strict=True)])
    kernels[counts == 0] = np.nan
    found = jax.jit(grouped_dot)(x, kernels, counts)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_its_derivatives_are_those_of_ragged_dot():
    x, kernels, counts = made(SIZES[2])
    own, given = (
        jax.jit(jax.grad(lambda x, kernels, dot=dot: jnp.sum(jnp.sin(dot(x, kernels, counts))), (0, 1)))(x, kernels)
        for dot in (grouped_dot, jax.lax.ragged_dot)
    )
    for a, b in zip(own, given, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("platform", "loops"), (("cpu", True), ("tpu", False), ("cuda", False)))
def test_other_platforms_have_ragged_dot(platform, loops):
    text = jax.jit(grouped_dot).trace(*made(SIZES[1])).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == loops and ("chlo.ragged_dot" in text) != loops


def test_a_mesh_that_splits_has_ragged_dot():
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        assert "ragged_dot" in str(jax.make_jaxpr(grouped_dot)(*made(SIZES[1])).jaxpr)
