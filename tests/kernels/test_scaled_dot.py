"""Products with matrices of few bits whose scales are of groups of inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.scaled_dot import gpu, scaled_dot

WAYS = {"xla": scaled_dot, "gpu": functools.partial(gpu.dot, interpret=True)}


def made(rows, groups, size, outputs, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, groups * size)).astype(np.float32)
    low, high = (-8, 8) if dtype == jnp.int4 else (-128, 128)
    values = rng.integers(low, high, (groups * size, outputs))
    return x, jnp.asarray(values, dtype), rng.normal(size=(groups, outputs)).astype(np.float32)


@pytest.mark.parametrize("dtype", (jnp.int4, jnp.int8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "shape", ((3, 2, 32, 6), (70, 3, 16, 2 * gpu.COLUMNS + 10), (1, 4, 128, 6)), ids=("small", "tiles", "parts")
)
def test_a_group_has_its_scale(way, shape, dtype):
    """Rows and outputs fill a tile, or several and a part of one; one program or several share the inputs of an output."""
    x, values, scale = made(*shape, dtype)
    assert gpu.takes(values, scale)
    want = x.astype(np.float64) @ (np.asarray(values, np.float64) * np.repeat(scale, shape[2], axis=0))
    np.testing.assert_allclose(jax.jit(WAYS[way])(x, values, scale), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", (1, 3, 70))
def test_rows_in_bfloat16_are_multiplied_exactly(rows):
    """In every number of rows: the sums are in float32."""
    x, values, scale = made(rows, 2, 32, 6, jnp.int4)
    x = jnp.asarray(x, jnp.bfloat16)
    want = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.repeat(scale, 32, axis=0))
    np.testing.assert_allclose(jax.jit(scaled_dot)(x, values, scale), want, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
def test_a_gpu_has_its_own_where_it_takes_the_groups():
    for size, own in ((16, True), (8, False)):
        text = jax.jit(scaled_dot).trace(*made(3, 2, size, 6, jnp.int4)).lower(lowering_platforms=("cuda",)).as_text()
        assert ("xla.gpu.triton" in text) == own
    text = jax.jit(scaled_dot).trace(*made(3, 2, 16, 6, jnp.int4)).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text


def test_it_maps_and_has_derivatives():
    x, values, scale = made(3, 2, 16, 6, jnp.int4)
    assert scaled_dot(x[:0], values, scale).shape == (0, 6)
    found = jax.vmap(scaled_dot, in_axes=(0, None, None))(np.stack([x, 2 * x]), values, scale)
    np.testing.assert_allclose(found, [scaled_dot(x, values, scale), scaled_dot(2 * x, values, scale)], rtol=1e-5)
    plain = np.asarray(values, np.float32) * np.repeat(scale, 16, axis=0)
    np.testing.assert_allclose(
        jax.grad(lambda x: scaled_dot(x, values, scale)[1, 2])(x),
        np.eye(3)[1][:, None] * plain[:, 2],
        rtol=1e-5,
        atol=1e-5,
    )
