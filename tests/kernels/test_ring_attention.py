"""Ring attention against dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.conformance import but_slow

from specjax.kernels.ring_attention import ring_attention
from specjax.sharding import make_mesh

MESHES = {1: "data=8", 2: "context=2,model=4", 4: "data=2,context=4"}


def operands(queries, keys, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(2, queries, 4, 8), draw(2, keys, 2, 8), draw(2, keys, 2, 8)


@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("count", but_slow(MESHES, 1, 2))
def test_equals_dense_attention(count, is_causal):
    """27 and 29 keys are no multiple of the devices, and their parts none of the keys scored at a time."""
    mesh = make_mesh(MESHES[count])
    for queries, keys in ((27, 27), (8, 29)):
        given = operands(queries, keys)
        got = ring_attention(*given, is_causal=is_causal, mesh=mesh, block_size=3)
        want = jax.nn.dot_product_attention(*given, is_causal=is_causal)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_takes_the_ambient_mesh_half_precision_and_a_scale():
    given = operands(16, 16, jnp.bfloat16)
    with jax.set_mesh(make_mesh("context=8")):
        got = ring_attention(*given, scale=0.1)
    want = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in given), scale=0.1)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)
    np.testing.assert_allclose(ring_attention(*given, scale=0.1).astype(jnp.float32), want, atol=0.03)  # one device


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
def test_its_gradient_is_that_of_dense_attention(is_causal):
    given = operands(27, 27)
    mesh = make_mesh("context=4,model=2")
    gradients = lambda attend: jax.grad(lambda *x: (attend(*x, is_causal=is_causal) ** 2).sum(), (0, 1, 2))(*given)
    got = gradients(lambda *x, **options: ring_attention(*x, **options, mesh=mesh, block_size=3))
    for a, b in zip(got, gradients(jax.nn.dot_product_attention), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_its_gradient_keeps_no_scores():
    mesh = make_mesh("context=8")
    x = jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.float32, sharding=NamedSharding(mesh, jax.P(None, "context")))
    gradient = jax.grad(lambda *x: ring_attention(*x, is_causal=True, mesh=mesh).sum(), (0, 1, 2))
    program = jax.jit(gradient).lower(x, x, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 8192 * 8192 * 4 / 8  # a device's part of the scores


def test_shapes_that_do_not_go_together():
    query, key, value = operands(8, 8)
    with pytest.raises(ValueError, match=r"needs a query \[B, T, N, H\]"):
        ring_attention(query, key, value[:, :4])
    with pytest.raises(ValueError, match="kv-heads divide"):
        ring_attention(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="none empty"):
        ring_attention(query, key[:, :0], value[:, :0])


def test_meshes_that_it_cannot_split_over():
    given = operands(8, 8)
    explicit = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="axes are Auto"):
        ring_attention(*given, mesh=explicit)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="axes are Auto"):
        ring_attention(*given)
    mesh = make_mesh("context=8")
    inside = jax.shard_map(ring_attention, mesh=mesh, in_specs=jax.P(None, "context"), out_specs=jax.P(None, "context"))
    with pytest.raises(ValueError, match="outside shard_map"):
        inside(*given)
