"""Products of a few rows on a CPU: the kernel that Numba compiles against definitions."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba", reason="the kernel needs Numba: pip install 'specjax[cpu]'")

from specjax.kernels.few_rows import api, few_rows, takes
from specjax.models.few_bits import dot

SHAPES = ((5, 301, 1100), (12, 1536, 67), (3, 64, 5000))
"""Rows, inputs, outputs: no multiples of a vector's width, few outputs, more outputs than a block has."""


def operands(rows, inputs, outputs):
    made = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    return made(0, rows, inputs), made(1, inputs, outputs)


def by_inputs(x, matrix):
    return few_rows(x, matrix)


def by_outputs(x, matrix):
    return few_rows(x, jnp.array(matrix.T), True)


@pytest.mark.parametrize("way", (by_inputs, by_outputs))
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product(way, shape):
    x, matrix = operands(*shape)
    want = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
    np.testing.assert_allclose(jax.jit(way)(x, matrix), want, rtol=0, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("way", (by_inputs, by_outputs))
def test_a_row_does_not_depend_on_the_others(way):
    x, matrix = operands(7, 301, 1100)
    every = np.asarray(way(x, matrix))
    for rows in (slice(0, 1), slice(3, 5), slice(1, 7)):
        np.testing.assert_array_equal(way(x[rows], matrix), every[rows])


def test_axes_before_the_last_are_kept():
    x, matrix = operands(6, 256, 512)
    np.testing.assert_array_equal(few_rows(x.reshape(2, 3, 256), matrix).reshape(6, 512), few_rows(x, matrix))


@pytest.mark.parametrize("way", (by_inputs, by_outputs))
def test_gradients_and_mapped_axes_are_the_plain_products(way):
    x, matrix = operands(4, 256, 320)
    loss = lambda product: lambda x, matrix: (product(x, matrix) ** 2).sum()
    got = jax.grad(loss(way), (0, 1))(x, matrix)
    for one, want in zip(got, jax.grad(loss(jnp.matmul), (0, 1))(x, matrix), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-2)
    pairs = jnp.stack([matrix, -matrix])
    np.testing.assert_allclose(jax.vmap(way, (None, 0))(x, pairs)[1], -(x @ matrix), rtol=0, atol=3e-4)


def test_programs_may_run_at_once():
    """Threads of XLA that all wait for each other's parts would never end."""
    x, matrix = operands(5, 512, 1024)

    @jax.jit
    def many(x, matrix):
        return jax.lax.fori_loop(0, 40, lambda _, h: jnp.tanh(few_rows(jnp.tanh(few_rows(h, matrix)), matrix.T)), x)

    want, found = np.asarray(many(x, matrix)), {}
    users = [
        threading.Thread(target=lambda i=i: found.update({i: np.asarray(many(x, matrix))}), daemon=True)
        for i in range(6)
    ]
    for user in users:
        user.start()
    for user in users:
        user.join(timeout=60)
    assert len(found) == 6
    for got in found.values():
        np.testing.assert_array_equal(got, want)


def test_what_is_taken(monkeypatch):
    x, matrix = operands(5, 256, 320)
    assert takes(x, matrix) and takes(x.reshape(1, 5, 256), matrix)
    assert not takes(jnp.zeros((api.MOST_ROWS + 1, 256)), matrix)
    assert not takes(x[:, :16], matrix[:16])
    assert not takes(x.astype(jnp.bfloat16), matrix) and not takes(x, matrix.astype(jnp.bfloat16))
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert not takes(x, matrix)
    monkeypatch.setattr(api, "_has_numba", lambda: False)
    assert not takes(x, matrix)


def test_products_of_models_are_the_kernel_on_a_cpu_alone():
    x, matrix = operands(5, 256, 320)
    product = jax.jit(dot)
    assert "specjax_few_rows" in product.lower(x, matrix).as_text()
    assert "specjax_few_rows" not in product.trace(x, matrix).lower(lowering_platforms=("tpu",)).as_text()
    assert "specjax_few_rows" not in product.lower(jnp.zeros((64, 256)), matrix).as_text()
