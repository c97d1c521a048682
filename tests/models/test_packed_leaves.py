"""Matrices that stay as a file packs them: their numbers, products with them, and texts, for GGUF's blocks and MXFP4."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import gguf_files
from support.conformance import but_slow

import specjax
from specjax import models
from specjax.kernels.scaled_dot import gpu, scaled_dot
from specjax.models import ModelError, keeping
from specjax.models.few_bits import dot, embedded, is_quantised, plain
from specjax.models.gguf.blocks import LAYOUTS, TABLE
from specjax.models.gguf.types import TYPES
from specjax.models.grouped import grouped_dot
from specjax.models.packed_matrix import Packed, Steps
from specjax.plan.held import chip_bytes
from specjax.sharding import make_mesh

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")


def levels(parts, blocks):
    """Scales or minima of every number."""
    own = [np.repeat(part.read(blocks).astype(part.kind).astype(np.float32), part.each, axis=1) for part in parts]
    return functools.reduce(np.multiply, own)


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_and_scales_make_the_numbers_of_the_package(name):
    """Bit for bit, of random bytes; those whose scales are no numbers are left out."""
    (kind,) = (kind for kind in TYPES.values() if kind.name == name)
    blocks = np.random.default_rng(0).integers(0, 256, (200, kind.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.code))
    finite = np.isfinite(want).all(axis=1)
    blocks, layout = blocks[finite], LAYOUTS[name]
    codes = layout.values.read(blocks).astype(layout.values.kind)
    numbers = np.array(layout.table, np.float32)[codes.astype(int)] if layout.table else codes.astype(np.float32)
    found = numbers * levels(layout.scale, blocks)
    found = found + levels(layout.minimum, blocks) if layout.minimum else found
    assert finite.sum() > 150
    np.testing.assert_array_equal(found, want[finite])


def made(kind, zero=False, minimum=False, steps=False, powers=False, table=(), inputs=64, outputs=6, lead=()):
    """A matrix `[*lead, inputs, outputs]` in groups of 16."""
    rng, groups = np.random.default_rng(1), (*lead, inputs // 16, outputs)
    low = 0 if table or kind == jnp.uint4 else -8
    codes = jnp.asarray(rng.integers(low, low + 16, (*lead, inputs, outputs)), jnp.int8)
    values = codes.astype(jnp.int8).astype(kind)
    one = lambda: jnp.asarray(rng.uniform(0.01, 0.1, groups), jnp.float16)
    if powers:
        one = lambda: jnp.asarray(2.0 ** rng.integers(-6, 2, groups), jnp.float8_e8m0fnu)
    if steps:
        sizes = lambda: jnp.asarray(rng.uniform(0.001, 0.01, (*lead, 1, outputs)), jnp.float16)
        one = lambda: Steps(sizes(), jnp.asarray(rng.integers(1, 64, groups), jnp.uint8))
    shift = jnp.asarray(rng.integers(-8, 8, groups), jnp.int4) if zero else None
    return Packed(jnp.zeros((*lead, 1, 1)), values, one(), shift, one() if minimum else None, table)


KINDS = {
    "int8": made(jnp.int8), "int4_zero": made(jnp.int4, zero=True), "uint4_minimum": made(jnp.uint4, minimum=True),
    "uint4_steps": made(jnp.uint4, minimum=True, steps=True), "table": made(jnp.uint4, table=TABLE),
    "float4": made(jnp.float4_e2m1fn), "powers": made(jnp.float4_e2m1fn, powers=True),
}  # fmt: skip


@pytest.mark.parametrize("name", but_slow(KINDS, "int8", "int4_zero", "uint4_minimum"))
def test_a_product_is_that_of_the_numbers(name):
    """On a CPU and by the GPU's kernel; rows of a table are those of its numbers."""
    kernel = KINDS[name]
    numbers = np.asarray(plain(kernel), np.float64)
    x = np.random.default_rng(2).normal(size=(1, 5, 64)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(dot)(x, kernel), x @ numbers, rtol=2e-5, atol=2e-5)
    scale, _ = kernel.factors()
    assert gpu.takes(kernel.values, scale)
    want = scaled_dot(x[0], kernel.values, scale, kernel.table)
    found = gpu.dot(jnp.asarray(x[0]), kernel.values, scale, kernel.table, interpret=True)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    ids = jnp.asarray([[4, 1]])
    np.testing.assert_array_equal(embedded(kernel.T, ids, 6), numbers.T[np.asarray(ids)].astype(np.float32))


@pytest.mark.parametrize("name", ("uint4_minimum", "float4"))
def test_experts_have_products_too(name):
    """On a mesh they are made plain."""
    kernels = made(KINDS[name].values.dtype, minimum=name == "uint4_minimum", lead=(3,))
    sizes, x = np.array([2, 0, 3], np.int32), np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    want = np.stack([row @ np.asarray(plain(kernels))[group] for row, group in zip(x, (0, 0, 2, 2, 2), strict=True)])
    np.testing.assert_allclose(jax.jit(grouped_dot)(x, kernels, sizes), want, rtol=2e-5, atol=2e-5)
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        np.testing.assert_allclose(jax.jit(grouped_dot)(x, kernels, sizes), want, rtol=2e-5, atol=2e-5)


def test_a_derivative_goes_through():
    kernel = KINDS["uint4_minimum"]
    x = jnp.ones((2, 64))
    found = jax.grad(lambda x: dot(x, kernel)[1, 2])(x)
    np.testing.assert_allclose(found[1], np.asarray(plain(kernel))[:, 2], rtol=1e-5)


STORED = {"llama": "Q4_1", "mixtral": "Q8_0", "gpt-oss": "MXFP4", "qwen3": "Q5_0"}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """`file(name)`: a GGUF file of that case."""
    pytest.importorskip("torch", reason="torch is not installed: pip install torch")

    @functools.cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        gguf_files.build(name, folder / "plain")
        gguf_files.write(name, folder / "plain", folder / "it.gguf", STORED[name])
        return folder / "it.gguf"

    return get


@pytest.mark.parametrize("name", but_slow(STORED, "mixtral", "qwen3"))
def test_a_file_is_kept_as_it_is_packed(file, name, caplog):
    """The same numbers as the plain reading, on a mesh too; what it costs on a CPU is said."""
    want = models.load(file(name)).params
    for mesh in (None, make_mesh("model=2", jax.devices()[:2])):
        model = models.load(file(name), weights="packed", mesh=mesh)
        kept = [x for x in jax.tree.leaves(model.params, is_leaf=is_quantised) if is_quantised(x)]
        assert kept and all(x.dtype == jnp.float32 for x in kept) and model.weights == "packed"
        jax.tree.map(np.testing.assert_array_equal, keeping.unpacked(model.params), want)
    assert "slower than with weights='plain'" in caplog.text
    assert "splits the packed matrices" in keeping.cost("gpu", 2)
    assert keeping.cost("gpu", 1) is keeping.cost("tpu", 4) is None
    assert models.load(model, weights="plain").weights is None
    with pytest.raises(ModelError, match="are not put into another format: load it with weights='plain'"):
        models.load(model, weights="int8")


def test_elsewhere_than_on_a_cpu_packed_is_usual(file, monkeypatch):
    """Where a word asks for the plain numbers, or for others, they are not."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    asked = {word: models.load(file("llama"), dtype="float32", weights=word) for word in (None, "plain", "int8")}
    assert [model.weights for model in asked.values()] == ["packed", None, "int8"]
    assert asked[None] is models.load(asked[None], weights="packed")


@pytest.mark.parametrize("name", ("llama", "gpt-oss"))
def test_shapes_are_those_of_what_is_read(file, name):
    own = models.load(file(name), weights="packed", dtype="bfloat16").params
    shapes = models.abstract(file(name), "bfloat16", weights="packed").params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), own) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)


def test_the_plan_of_a_published_model_counts_its_codes():
    """gpt-oss-20b: 24 layers of 32 experts of three matrices of 2,880 by 2,880, at 4.25 bits."""
    model = models.abstract("openai/gpt-oss-20b", "bfloat16", weights="packed")
    own = [x for x in jax.tree.leaves(model.params, is_leaf=is_quantised) if is_quantised(x)]
    codes, scales = sum(x.values.size for x in own), sum(x.scale.size for x in own)
    assert codes == 24 * 32 * 3 * 2880**2 and scales == codes // 32
    assert round(chip_bytes(model.params) / 1e9, 2) == 13.76  # as its files, 13.8 GB
    assert {x.values.dtype for x in own} == {np.dtype(ml_dtypes.float4_e2m1fn)}
    with pytest.raises(ModelError, match="give a folder that has them"):
        models.abstract("Qwen/Qwen3-8B", weights="packed")


@pytest.mark.slow
@pytest.mark.covers("models", "gguf", "packed")
@pytest.mark.parametrize("name", STORED)
def test_texts_are_those_of_the_plain_reading(file, name, tmp_path):
    """With a drafter, on a mesh, and after `save`, which writes plain numbers."""
    ids = [[5, 9, 4, 9, 4], [7, 3]]
    options = {"max_new_tokens": 12, "temperature": 0.0}
    tokens = lambda model, **more: [r.tokens for r in specjax.generate(model, ids, **options, **more)]
    want = tokens(models.load(file(name)))
    model = models.load(file(name), weights="packed")
    assert tokens(model) == tokens(model, drafter="prompt_lookup") == want
    assert tokens(model, mesh=make_mesh("model=2", jax.devices()[:2])) == want
    models.save(tmp_path / "it", model.lm, model.params, eos_ids=model.eos_ids)
    assert tokens(models.load(tmp_path / "it")) == want
