"""Ring attention against dense attention."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.conformance import but_slow
from support.planned import skip_without_compiler

from specjax import models
from specjax.kernels.ring_attention import ring_attention
from specjax.kernels.ring_attention.traffic import fewest, has_switch, traffic
from specjax.plan.rings import rings
from specjax.sharding import make_mesh
from specjax.sharding.aot import devices

MESHES = {1: "data=8", 2: "context=2,model=4", 4: "data=2,context=4", 8: "context=8"}


def operands(queries, keys, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(2, queries, 4, 8), draw(2, keys, 2, 8), draw(2, keys, 2, 8)


@pytest.mark.parametrize("moves", ("keys", "queries"))
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("count", but_slow(MESHES, 1, 2))
def test_equals_dense_attention(count, is_causal, moves):
    """27 and 29 keys are no multiple of the devices, and their parts none of the keys scored at a time."""
    mesh = make_mesh(MESHES[count])
    for queries, keys in ((27, 27), (5, 5), (8, 29)):
        if moves == "queries" and is_causal and queries != keys:
            continue
        given = operands(queries, keys)
        got = ring_attention(*given, is_causal=is_causal, mesh=mesh, block_size=3, moves=moves)
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
@pytest.mark.parametrize("moves", ("keys", "queries"))
@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
def test_its_gradient_is_that_of_dense_attention(is_causal, moves):
    given = operands(27, 27)
    mesh = make_mesh("context=4,model=2")
    gradients = lambda attend: jax.grad(lambda *x: (attend(*x, is_causal=is_causal) ** 2).sum(), (0, 1, 2))(*given)
    got = gradients(lambda *x, **options: ring_attention(*x, **options, mesh=mesh, block_size=3, moves=moves))
    for a, b in zip(got, gradients(jax.nn.dot_product_attention), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_its_gradient_keeps_no_scores():
    mesh = make_mesh("context=8")
    x = jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.float32, sharding=NamedSharding(mesh, jax.P(None, "context")))
    gradient = jax.grad(lambda *x: ring_attention(*x, is_causal=True, mesh=mesh).sum(), (0, 1, 2))
    program = jax.jit(gradient).lower(x, x, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 8192 * 8192 * 4 / 8  # a device's part of the scores


def test_shapes_that_do_not_go_together():
    query, key, value = operands(5, 5)
    with pytest.raises(ValueError, match=r"needs a query \[B, T, N, H\]"):
        ring_attention(query, key, value[:, :4])
    with pytest.raises(ValueError, match="kv-heads divide"):
        ring_attention(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="none empty"):
        ring_attention(query, key[:, :0], value[:, :0])
    with pytest.raises(ValueError, match="moves 'keys', 'queries' or the 'fewest' bytes, not 'values'"):
        ring_attention(query, key, value, moves="values")
    with pytest.raises(ValueError, match="queries move only with as many keys in a causal sequence, not 3 and 5"):
        ring_attention(query[:, :3], key, value, is_causal=True, moves="queries")


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


def test_the_bytes_over_a_link():
    """Four chunks of three tokens, as the authors' code sends them: all queries once and the first chunk of some."""
    sizes = {"tokens": 24, "heads": 2, "kv_heads": 2, "width": 8, "devices": 4, "size": 4}
    keys = traffic("keys", is_causal=True, **sizes)
    assert (keys.forth, keys.back) == (3 * 6 * 2 * 2 * 8 * 4, 0)
    chunk = 3 * 2 * 8 * 4
    late, early = 3 * 4, 3 + 2 + 1  # chunks that go one device further, of all devices
    queries = traffic("queries", is_causal=True, **sizes)
    assert queries.forth == chunk * (late + early) / 4
    found = 3 * 2 * 9 * 4
    assert queries.back == found * sum((4 + 4 - step) * step for step in (1, 2, 3)) / 4
    switched = traffic("queries", is_causal=True, switched=True, **sizes)
    assert switched.back == found * (late + early) / 4 and switched.longest == switched.back
    assert traffic("queries", is_causal=False, **sizes).forth == 3 * 2 * chunk
    many = jax.ShapeDtypeStruct((1, 64, 8, 16), jnp.float32)
    assert fewest(many, many, True, 2) == "queries"  # as many kv-heads as heads, and a short way home
    assert fewest(many, jax.ShapeDtypeStruct((1, 64, 1, 16), jnp.float32), True, 2) == "keys"
    assert fewest(many, many, True, 8) == "keys" and fewest(many, many, True, 8, switched=True) == "queries"
    assert not has_switch(make_mesh("context=8"))


def test_a_plan_says_what_both_send():
    lm = models.abstract("tiny", "bfloat16").lm
    mixer = lm.config.layers[0].mixer
    own = rings(lm, make_mesh("context=4,model=2"), 4096, "bfloat16")["ring"]
    sizes = {
        "heads": mixer.num_attention_heads // 2,
        "kv_heads": mixer.num_key_value_heads // 2,
        "width": mixer.head_dim,
    }
    assert own == {
        moves: traffic(moves, tokens=4096, devices=4, is_causal=True, **sizes).longest for moves in ("keys", "queries")
    }
    assert rings(lm, make_mesh("model=2,data=4"), 4096, "bfloat16") == {}


@pytest.mark.slow
def test_what_a_compiled_program_sends():
    """Over 16 chips: queries to the device before, results straight home, and the first chunk of later owners alone."""
    skip_without_compiler("v5p:2x2x4")
    mesh = make_mesh("context=16", devices("v5p:2x2x4"))
    assert not has_switch(mesh) and has_switch(make_mesh("context=8", devices("h100:8")))
    x = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16, sharding=NamedSharding(mesh, jax.P(None, "context")))
    run = jax.jit(lambda *x: ring_attention(*x, is_causal=True, mesh=mesh, moves="queries"))
    text = run.lower(x, x, x).compile().as_text()
    lines = re.findall(r"collective-permute(?:-start)?\([^\n]*source_target_pairs=\{(.*?)\}\}", text)
    pairs = [re.findall(r"(\d+),(\d+)", line) for line in lines]
    ways = collections.Counter()
    for each in pairs:
        steps = {(int(there) - int(here)) % 16 for here, there in each}
        if len(steps) == 1:
            ways[steps.pop(), len(each)] += 1
    for step in range(1, 16):
        assert ways[15, 16 - step] >= 1, "the first chunk of queries reaches those whose owner comes later"
        assert ways[step, 16] >= 1 and ways[step, 16 - step] >= 1, "results go straight home"
    assert "all-gather" not in text and "all-to-all" not in text
