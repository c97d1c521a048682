"""The Mosaic kernel for Hopper in JAX's interpreter, where fresh memory is NaN and a read beyond an array's end is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import holes, ring, sinks, world

from specjax.kernels.tree_attention import gpu, mosaic_gpu, shares, tree_attention
from specjax.kernels.tree_attention.parts import Operands
from specjax.kernels.tree_attention.reference import reference


def check(operands, options, **settings):
    """Against the definition, as exactly as numbers of 16 bits allow."""
    settings["scale"] = operands[0].shape[-1] ** -0.5

    @jax.jit
    def attend(operands, options):
        return tree_attention(*operands, **options, **settings, implementation="mosaic_gpu_interpreted")

    got = attend(operands, options)
    assert got.dtype == operands[0].dtype
    want = reference(*operands, **options, **settings)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0.03, atol=0.03)
    return got


@pytest.mark.slow
def test_a_ring_with_all_that_there_is(monkeypatch):
    """More blocks a part than are fetched ahead, the last of which begins within the one before; rows that end early, two words
    of own keys, two kv-heads, and a query that sees nothing."""
    monkeypatch.setattr(shares, "PROGRAMS", 2)
    texts = (9, 328, 1000)
    operands, options = world(328, np.minimum(texts, 328), past=61, group=1, dtype=jnp.bfloat16, width=64)
    positions = jnp.asarray(texts)[:, None] + jnp.arange(66)[None]
    options |= {"query_positions": positions[:, 61:], "key_positions": positions, "cache_positions": ring(328, texts)}
    options |= {"unseen": holes(328).at[0].set(True), "sinks": sinks(2)}
    options["visible"] = options["visible"].at[0, 2].set(False)
    got = check(operands, options, window=300, soft_cap=2.0)
    assert (got[0, 2] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "block", "window"), [(jnp.bfloat16, 1, None), (jnp.float16, 20, 150)], ids=["one query", "two tiles"]
)
def test_wide_heads(dtype, block, window):
    """Parts of one block, some of them empty; and queries that a tile does not hold, under a window."""
    operands, options = world(200, (0, 129, 200), dtype=jnp.float32, block=block, heads=1, group=4, width=128)
    operands = [x if x.dtype == jnp.int32 else jnp.clip(x, -6e4, 6e4).astype(dtype) for x in operands]
    check(operands, options, window=window)


@pytest.mark.parametrize("rows", (1, 20, 64, 300))
def test_parts_and_tiles_are_those_of_the_triton_kernel(rows):
    given = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    operands = Operands(
        given(2, 8, rows, 128), *[given(2, 8, 20, 128)] * 2, *[given(2, 8, 8192, 128)] * 2,
        jax.ShapeDtypeStruct((2,), jnp.int32), visible=jax.ShapeDtypeStruct((2, rows, 20), bool),
    )  # fmt: skip
    sums = []
    for way in (gpu, mosaic_gpu):
        program = jax.make_jaxpr(lambda operands, way=way: way.find(operands, scale=1.0, window=None, soft_cap=None))(
            operands
        )
        (kernel,) = [eqn for eqn in program.eqns if len(eqn.outvars) == 3]
        sums.append(kernel.outvars[2].aval.shape)
    cut = shares.shares(operands, 64, 64)
    assert cut.parts > 1
    assert sums[0] == (2, 8, cut.parts + 1, rows, 128)
    assert sums[1] == (2, 8, cut.parts + 1, cut.tiles * cut.tile, 128)


def test_it_is_lowered_for_cuda():
    operands, options = world(128, (0, 37, 128), dtype=jnp.bfloat16, width=64)
    attend = lambda operands: tree_attention(*operands, **options, scale=1.0, implementation="mosaic_gpu")
    assert "@mosaic_gpu_v2" in jax.export.export(jax.jit(attend), platforms=["cuda"])(operands).mlir_module()
    with pytest.raises(ValueError, match="made for NVIDIA's Hopper.*choose 'pallas', 'xla' or None"):
        attend(operands)
    with pytest.raises(ValueError, match="jax.vmap maps over it; choose 'pallas', 'xla' or None"):
        jax.vmap(attend)(jax.tree.map(lambda x: x[None], operands))


@pytest.mark.parametrize(
    ("capacity", "settings", "said"),
    [
        (128, {"width": 80}, "width of 64 or 128, not 80"),
        (128, {"width": 64, "dtype": jnp.float32}, "not float32 and float32"),
        (100, {"width": 64}, "multiple of 8, not 100"),
        (56, {"width": 64}, "at least 64 slots"),
    ],
)
def test_what_it_does_not_take_is_said(capacity, settings, said):
    operands, options = world(capacity, (0, 37, capacity), **{"dtype": jnp.bfloat16} | settings)
    with pytest.raises(ValueError, match=f"Mosaic GPU kernel.*{said}.*choose 'pallas', 'xla' or None"):
        tree_attention(*operands, **options, scale=1.0, implementation="mosaic_gpu_interpreted")


def test_a_quantised_cache_is_refused():
    operands, options = world(128, (0, 37, 128), dtype=jnp.bfloat16, width=64)
    few = [x.astype(jnp.float8_e4m3fn) for x in operands[3:5]]
    scales = dict.fromkeys(("key_scale", "value_scale"), jnp.ones(few[0].shape[:3]))
    with pytest.raises(ValueError, match="not bfloat16 and float8_e4m3fn; choose 'pallas'"):
        tree_attention(
            *operands[:3], *few, operands[5], **options, **scales, scale=1.0, implementation="mosaic_gpu_interpreted"
        )


def test_another_gpu_is_refused(monkeypatch):
    class Ampere:
        compute_capability = "8.0"

    monkeypatch.setattr(jax, "devices", lambda: [Ampere()])
    operands, options = world(128, (0, 37, 128), dtype=jnp.bfloat16, width=64)
    with pytest.raises(ValueError, match="capability 9.0, and the device has 8.0"):
        tree_attention(*operands, **options, scale=1.0, implementation="mosaic_gpu_interpreted")
