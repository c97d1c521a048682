"""Products of rows sorted by group: those of groups that have rows, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.grouped_dot import gpu, grouped_dot, tpu
from specjax.sharding import make_mesh

X, E, F = 7, 5, 6
SIZES = (
    (1, 0, 0, 0, 0, 0, 0),
    (0, 0, 3, 0, 0, 0, 1),
    (0, 40, 0, 1, 9, 0, 0),
    (5, 6, 7, 8, 9, 10, 11),
    (0, 0, 0, 0, 0, 0, 150),
)


def made(sizes, inputs=E, outputs=F):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), inputs)).astype(np.float32)
    return x, rng.normal(size=(X, inputs, outputs)).astype(np.float32), np.asarray(sizes, np.int32)


def wanted(x, kernels, counts):
    return np.stack([row @ kernels[group] for row, group in zip(x, np.repeat(np.arange(X), counts), strict=True)])


@pytest.mark.parametrize("dot", (grouped_dot, functools.partial(gpu.dot, interpret=True)), ids=("cpu", "gpu"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_a_product_a_row_and_reads_no_empty_group(sizes, dot):
    x, kernels, counts = made(sizes)
    want = wanted(x, kernels, counts)
    kernels[counts == 0] = np.nan
    np.testing.assert_allclose(jax.jit(dot)(x, kernels, counts), want, rtol=1e-4, atol=1e-5)


def test_a_gpu_goes_through_several_tiles_of_inputs_and_outputs():
    """Rows after those of all groups are there and in no tile."""
    x, kernels, counts = made(SIZES[3], inputs=gpu.DEPTH + 6, outputs=2 * gpu.COLUMNS + 2)
    want = wanted(x, kernels, counts)
    more = np.concatenate([x, np.full((30, x.shape[1]), np.nan, x.dtype)])
    found = gpu.dot(more, kernels, counts, interpret=True)[: len(x)]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_a_gpu_takes_int8():
    x, kernels, counts = made(SIZES[2])
    whole = np.round(20 * kernels).astype(np.int8)
    found = jax.jit(functools.partial(gpu.dot, interpret=True))(x, whole, counts)
    np.testing.assert_allclose(found, wanted(x, whole.astype(np.float32), counts), rtol=1e-4, atol=1e-3)


def test_a_tpu_multiplies_float32_by_bfloat16_as_float32():
    """On the values that a product of bfloat16 rounds away."""
    x, kernels, counts = made(SIZES[2])
    kernels = jnp.asarray(kernels, jnp.bfloat16)
    want = wanted(x.astype(np.float64), np.asarray(kernels, np.float64), counts)
    np.testing.assert_allclose(jax.jit(tpu.dot)(x, kernels, counts), want, rtol=1e-6, atol=1e-6)


def test_it_maps():
    given = [made(sizes) for sizes in ((5, 6, 7, 8, 9, 10, 5), (0, 40, 0, 1, 9, 0, 0))]
    found = jax.jit(jax.vmap(grouped_dot))(*map(np.stack, zip(*given, strict=True)))
    np.testing.assert_allclose(found, [wanted(*one) for one in given], rtol=1e-4, atol=1e-5)


def test_its_derivatives_are_those_of_ragged_dot():
    x, kernels, counts = made(SIZES[2])
    own, given = (
        jax.jit(jax.grad(lambda x, kernels, dot=dot: jnp.sum(jnp.sin(dot(x, kernels, counts))), (0, 1)))(x, kernels)
        for dot in (grouped_dot, jax.lax.ragged_dot)
    )
    for a, b in zip(own, given, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "platform", (WAYS := {"cpu": "stablehlo.while", "tpu": "chlo.ragged_dot", "cuda": "xla.gpu.triton"})
)
@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
def test_every_platform_has_its_own(platform):
    """Though it is traced without one, and nothing of the others is left."""
    text = jax.jit(grouped_dot).trace(*made(SIZES[1])).lower(lowering_platforms=(platform,)).as_text()
    assert [way for way in WAYS.values() if way in text] == [WAYS[platform]]


@pytest.mark.parametrize(("precision", "rows"), (("default", 1), ("highest", 3)))
def test_float32_rows_are_taken_apart_where_their_precision_is_asked_for(precision, rows):
    x, kernels, counts = made(SIZES[1])
    with jax.default_matmul_precision(precision):
        traced = jax.jit(grouped_dot).trace(x, kernels.astype(jnp.bfloat16), counts)
        (line,) = [
            line for line in traced.lower(lowering_platforms=("tpu",)).as_text().splitlines() if "ragged_dot" in line
        ]
    assert f"tensor<{rows * x.shape[0]}x" in line


def test_a_mesh_that_splits_has_ragged_dot():
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        assert "ragged_dot" in str(jax.make_jaxpr(grouped_dot)(*made(SIZES[1])).jaxpr)
