"""MLPs over a union of experts: all implementations against the formula, with unions that fit and that overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.union_mlp import dense, gpu, loop, tpu, union_mlp, union_size, xla
from specjax.kernels.union_mlp.api import MOST_ROWS
from specjax.plan import pallas
from specjax.sharding import make_mesh

N, X, CAPACITY = 5, 8, 4
WAYS = (None, "loop", "xla", "pallas_gpu_interpreted", "pallas_tpu_interpreted")
USED = (0, 1, CAPACITY, CAPACITY + 1, X)
EACH = [
    pytest.param(way, used, marks=() if way is None or used == CAPACITY else pytest.mark.slow)
    for way in WAYS
    for used in USED
]


def made(used, seed=0, rows=N, width=72, size=64):
    """Rows, weights of `used` experts in all, and matrices; with the experts that are used, `[X]`."""
    rng = np.random.default_rng(seed)
    keep = np.isin(np.arange(X), rng.permutation(X)[:used])
    weights = rng.normal(size=(rows, X)) * keep * (rng.random((rows, X)) < 0.4)
    weights[rng.integers(0, rows, X), np.arange(X)] = keep  # every one of them in some row
    x, up = rng.normal(size=(rows, width)), rng.normal(size=(width, X * size)) / width**0.5
    down = rng.normal(size=(X * size, width)) / size**0.5
    return tuple(np.asarray(one, np.float32) for one in (x, weights, up, down)), keep


def wanted(x, weights, up, down):
    inner = np.asarray(x, np.float64) @ up
    inner = (inner / (1 + np.exp(-inner))).reshape(*weights.shape, -1) * weights[:, :, None]
    return inner.reshape(len(x), -1) @ np.asarray(down, np.float64)


@functools.cache
def program(way):
    return jax.jit(functools.partial(union_mlp, capacity=CAPACITY, implementation=way))


@pytest.mark.parametrize(("way", "used"), EACH)
def test_it_is_the_formula_and_reads_no_other_expert(used, way):
    """Of unions that fit; one that overflows is computed whole. XLA's gather fills its places with experts, which it reads."""
    sizes = {"width": 128, "size": 128} if way == "pallas_tpu_interpreted" else {}
    (x, weights, up, down), keep = made(used, **sizes)
    want, unused = wanted(x, weights, up, down), np.repeat(~keep, up.shape[1] // X)
    if used <= CAPACITY and way != "xla":
        up[:, unused], down[unused] = np.nan, np.nan
    assert int(union_size(jnp.asarray(weights))) == used
    np.testing.assert_allclose(program(way)(x, weights, up, down), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ("pallas_gpu_interpreted", "pallas_tpu_interpreted"))
def test_bfloat16_matrices(way):
    """As rows of float32 meet them: the rows are rounded, sums are float32."""
    (x, weights, up, down), _ = made(3, rows=17, width=256, size=128)
    up, down = jnp.asarray(up, jnp.bfloat16), jnp.asarray(down, jnp.bfloat16)
    want = wanted(x, weights, np.asarray(up, np.float64), np.asarray(down, np.float64))
    found = program(way)(x, weights, up, down)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("used", (CAPACITY, pytest.param(X, marks=pytest.mark.slow)))
def test_its_derivatives_are_those_of_the_formula(used):
    given, _ = made(used)
    of = lambda dot: jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(dot(*given))), (0, 1, 2, 3)))(*given)
    for own, theirs in zip(of(functools.partial(union_mlp, capacity=CAPACITY)), of(dense.mlp), strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_maps():
    """One of the unions fits and the other does not."""
    given = [made(used)[0] for used in (2, 7)]
    found = jax.vmap(program(None))(*map(np.stack, zip(*given, strict=True)))
    np.testing.assert_allclose(found, [wanted(*one) for one in given], rtol=1e-4, atol=1e-4)


def test_the_cost_of_a_compiled_program_is_that_of_its_experts():
    """Operations and bytes of the gathered product follow the capacity; a round of the loop has those of one expert."""
    (x, weights, up, down), _ = made(1, rows=16, width=256, size=64)
    cost = lambda way, *more: jax.jit(way).lower(x, weights, up, down, *more).compile().cost_analysis()
    whole = cost(dense.mlp)
    least = 4 * 16 * 256 * X * 64
    assert least <= whole["flops"] < 1.05 * least
    for capacity in (1, 2, 4):
        some = cost(xla.mlp, jnp.arange(capacity), capacity)
        assert some["flops"] == pytest.approx(whole["flops"] * capacity / X, rel=0.05)
    turn = cost(loop.mlp, jnp.arange(CAPACITY), CAPACITY)  # the compiler counts the body of such a loop once
    assert turn["flops"] == pytest.approx(whole["flops"] / X, rel=0.05)
    assert turn["bytes accessed"] < 0.5 * whole["bytes accessed"]


@pytest.mark.slow
@pytest.mark.parametrize("used", (1, 3, CAPACITY))
def test_a_tpu_fetches_the_matrices_of_the_union(used):
    """Each once, whatever the capacity: a grid's point whose blocks are those of the point before fetches nothing."""
    (x, weights, up, down), keep = made(used, width=128, size=128)
    index = np.argsort(~keep, stable=True)[:CAPACITY].astype(np.int32)
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, weights, up, down)]
    jaxpr, found = jax.make_jaxpr(tpu.mlp)(*given, index, np.int32(used)), pallas._Found("tpu", 1)
    pallas._walk(jaxpr.jaxpr, jaxpr.consts, [None] * 4 + [index, np.asarray(used, np.int32)], found)
    (((*_, columns, rows, _), _),) = found.calls.values()
    assert columns == rows == used * up.nbytes // X


def test_only_one_of_both_ways_runs():
    """A conditional, and no selection among two results; a loop whose rounds are the union's experts."""
    given, _ = made(2)
    text = program("loop").lower(*given).compile().as_text()
    assert "conditional(" in text and "while(" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform", (WAYS_OF := {"cpu": "stablehlo.while", "tpu": "tpu_custom_call", "cuda": "xla.gpu.triton"})
)
@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
def test_every_platform_has_its_own(platform):
    given, _ = made(2, width=128, size=128)
    text = jax.jit(union_mlp).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    assert [way for way in WAYS_OF.values() if way in text] == [WAYS_OF[platform]]


@pytest.mark.slow
def test_what_kernels_do_not_take():
    given, _ = made(2)
    assert not tpu.takes(given[0], given[1], given[2]) and gpu.takes(given[2], given[1])
    narrow, _ = made(2, size=24)
    assert not gpu.takes(narrow[2], narrow[1])
    for platform in ("tpu", "cuda"):
        text = jax.jit(union_mlp).trace(*narrow).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call" not in text and "stablehlo.gather" in text


def test_many_rows_and_meshes_have_all_experts():
    """Nothing decides there."""
    text = lambda given: str(jax.make_jaxpr(union_mlp)(*given))
    few, many = made(2)[0], made(2, rows=MOST_ROWS + 1)[0]
    assert "cond" in text(few) and "cond" not in text(many)
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        assert "cond" not in text(few)


def test_bad_options():
    given, _ = made(2)
    with pytest.raises(ValueError, match="capacity must be 1 to 8, the number of experts, got 9"):
        union_mlp(*given, capacity=9)
    with pytest.raises(ValueError, match="union_mlp has no implementation 'fast'"):
        union_mlp(*given, implementation="fast")
