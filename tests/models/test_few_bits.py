"""Matrices in few bits: the definition number by number, products with them, reading, and texts that drafters do not change."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.conformance import but_slow, same, start, texts
from support.mesh_cases import HOT, MESHES, SHALLOW, decoder_on, placed
from support.mesh_cases import weights as weights_of
from support.shapes import changed, small

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, LlamaLM, ModelError, quantising
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.few_bits import Quantised, dot, is_quantised, plain, rows
from specjax.models.formats import read_format
from specjax.models.grouped import grouped_dot
from specjax.sharding import make_mesh

LINES = ("int8", "fp8", "int4:group=16", "int8:group=32,vocab=true", "int4:group=16,vocab=true")
SMALL = small(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, qkv_bias=True,
)  # fmt: skip
SPARSE = changed(SMALL, qkv_bias=False, qk_norm=True, experts=ExpertsConfig(4, 2, 32))


def by_definition(column, most, kind, dtype):
    """The scale and the values of numbers that share one, each by itself."""
    scale = np.float32(max(abs(float(w)) for w in column)) / np.float32(most)
    scale = dtype(scale if scale > 0 else 1)
    if kind == "fp8":
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        every = [(float(x), int(x.view(np.uint8)) & 1) for x in every if np.isfinite(x)]
        nearest = lambda w: min(every, key=lambda x: (abs(x[0] - float(w)), x[1]))[0]  # of two as near, the even one
        return scale, [nearest(np.float32(w) / np.float32(scale)) for w in column]
    last = int(most)
    return scale, [min(max(round(float(np.float32(w) / np.float32(scale))), -last - 1), last) for w in column]


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize(
    ("line", "most"), (("int8", 127.5), ("int4:group=4", 7.5), ("fp8", 448.0), ("int8:group=6", 127.5))
)
def test_numbers_are_those_of_the_definition(line, most, dtype):
    """Bit for bit, of a kernel and of a table; a column of zeros stays one."""
    form, kind = read_format(line), line.partition(":")[0]
    w = np.random.default_rng(0).normal(size=(12, 7)).astype(dtype).astype(np.float32)
    w[:, 3] = 0
    size = form.group or 12
    for axis, x in ((-2, w), (-1, w.T)):
        own = Quantised(*form.quantise(x, axis, dtype))
        found = np.asarray(plain(own, np.float32))
        for column, numbers in enumerate(w.T):
            for first in range(0, 12, size):
                scale, values = by_definition(numbers[first : first + size], most, kind, dtype)
                want = [np.float32(value) * np.float32(scale) for value in values]
                got = found if axis == -2 else found.T
                assert got[first : first + size, column].tolist() == want
    assert own.values.dtype == form.kind and own.dtype == dtype


def logits(lm, params):
    ids = np.random.default_rng(1).integers(0, 96, (2, 9))
    block = Block(
        jnp.asarray(ids), jnp.broadcast_to(jnp.arange(9), ids.shape), jnp.zeros(2, jnp.int32), None, causal=True
    )
    return jax.jit(lambda p: lm(p, block, None, wants=Wants(logits=True)).logits)(params)


@pytest.mark.parametrize("line", but_slow(LINES, *LINES[2:]))
@pytest.mark.parametrize(
    "config", (SMALL, SPARSE, changed(SMALL, tie_word_embeddings=True)), ids=("dense", "experts", "tied")
)
def test_a_model_computes_with_the_numbers_that_its_scales_say(config, line):
    """Its matrices are within half a step of what they were, and its logits are those of the plain matrices."""
    lm, form = LlamaLM(config), read_format(line)
    whole = lm.init(jax.random.key(0))
    params = form.params(whole)
    nodes = [x for x in jax.tree.leaves(params, is_leaf=is_quantised) if is_quantised(x)]
    in_layers = 2 * (4 + 3)
    of_vocab = (1 if config.head.tied else 2) if form.vocab else 0
    assert len(nodes) == in_layers + of_vocab
    near = jax.tree.map(plain, params, is_leaf=is_quantised)
    if form.name != "fp8":
        for x, was, now in zip(*(jax.tree.leaves(t, is_leaf=is_quantised) for t in (params, whole, near)), strict=True):
            step = float(x.scale.max()) if is_quantised(x) else 0
            assert float(jnp.abs(was - now).max()) <= 0.5001 * step
    np.testing.assert_allclose(logits(lm, params), logits(lm, near), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tied", (True, False))
def test_one_row_is_a_product_of_eight_on_tpus(tied, monkeypatch):
    """Every product of a token, those of more are as they were."""
    lm = LlamaLM(changed(SMALL, tie_word_embeddings=tied))
    params, took = lm.init(jax.random.key(0)), []

    def one(params, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        block = Block(ids, positions, jnp.zeros(len(ids), jnp.int32), None, causal=True)
        return lm(params, block, None, wants=Wants(logits=True)).logits

    ids = jnp.asarray([[5, 7]])
    want = [jax.jit(one)(params, ids[:, :count]) for count in (1, 2)]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, tpu, default: took.append(x.shape) or tpu(x))
    jax.clear_caches()
    got = [jax.jit(one)(params, ids[:, :count]) for count in (1, 2)]
    assert len(took) == 2 * 7 + 1 and {shape[:2] for shape in took} == {(1, 1)}
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("line", ("int8", "int4:group=4", "fp8"))
def test_products_of_groups(line):
    """Those of the plain matrices; a TPU and a GPU take int8 as it is."""
    form = read_format(line)
    rng, counts = np.random.default_rng(0), np.asarray((1, 0, 9, 0, 3), np.int32)
    x = rng.normal(size=(13, 8)).astype(np.float32)
    kernels = Quantised(*map(jnp.asarray, form.quantise(rng.normal(size=(5, 8, 6)).astype(np.float32), -2, np.float32)))
    numbers = np.asarray(plain(kernels))
    want = np.stack([row @ numbers[group] for row, group in zip(x, np.repeat(np.arange(5), counts), strict=True)])
    np.testing.assert_allclose(jax.jit(grouped_dot)(x, kernels, counts), want, rtol=1e-4, atol=1e-5)
    own = lambda platform: (
        jax.jit(grouped_dot).trace(x, kernels, counts).lower(lowering_platforms=(platform,)).as_text()
    )
    assert ("xla.gpu.triton" in own("cuda")) == (line == "int8")
    text = own("tpu")
    assert ("chlo.ragged_dot" in text) == (line == "int8") and ("stablehlo.while" in text) == (line != "int8")
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        np.testing.assert_allclose(jax.jit(grouped_dot)(x, kernels, counts), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_products_and_rows_of_one_matrix(dtype):
    form = read_format("int4:group=4")
    numbers = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    kernel = Quantised(*map(jnp.asarray, form.quantise(numbers, -2, jnp.dtype(dtype))))
    x = jnp.ones((2, 3, 8), dtype)
    assert dot(x, kernel).dtype == x.dtype and dot(x, kernel, jnp.float32).dtype == jnp.float32
    np.testing.assert_allclose(
        dot(x, kernel, jnp.float32), x.astype(jnp.float32) @ plain(kernel, jnp.float32), rtol=1e-3
    )
    turned = kernel.T
    assert (rows(turned, jnp.asarray([[4, 1]])) == plain(turned)[jnp.asarray([[4, 1]])]).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model and one with experts, on disk."""
    made = {}
    for name, config in (("dense", SMALL), ("experts", SPARSE)):
        made[name] = tmp_path_factory.mktemp("few_bits") / name
        models.save(made[name], LlamaLM(config), LlamaLM(config).init(jax.random.key(0)))
    return made


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("dense", "experts"))
@pytest.mark.parametrize("line", ("int8", "int4:group=16,vocab=true", "fp8"))
def test_reading_makes_what_is_made_of_a_read_model(folders, kind, line, monkeypatch):
    """A few outputs at a time; on any mesh, with copies of kv-heads too, where every part lies as its matrix does."""
    monkeypatch.setattr(quantising, "PIECE", 300)
    whole = models.load(folders[kind])
    model = models.load(folders[kind], weights=line)
    want = models.quantised(whole, line)
    assert model.weights == want.weights == str(read_format(line)) and f"weights in {line}" in repr(model)
    equal(model.params, want.params)
    for spec in ("data=1,model=8", "data=2,model=4"):
        mesh = make_mesh(spec)
        read = models.load(folders[kind], mesh=mesh, weights=line)
        lm, params = models.spread(want.lm, want.params, mesh)
        assert lm == read.lm
        equal(read.params, params)
        for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(params), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        q = read.params["layers"][0]["attention"]["q"]["kernel"]
        assert q.values.sharding.shard_shape(q.shape)[1] == 64 // mesh.shape["model"]


def test_an_orbax_folder_is_quantised_when_it_is_read(folders, tmp_path):
    whole = models.load(folders["dense"])
    models.save(tmp_path / "orbax", whole.lm, whole.params, layout="orbax")
    equal(models.load(tmp_path / "orbax", weights="int8").params, models.quantised(whole, "int8").params)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU")
def test_a_cpu_takes_a_byte_for_a_number_of_four_bits():
    """`docs/memory.md` says what it takes."""
    params = models.load("tiny", dtype="bfloat16", weights="int4").params
    assert f"{sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(params)) / 1e6:.2f}" == "4.79"


def test_groups_of_no_size_are_as_long_as_divides(folders):
    form = read_format("int4")
    assert [form.size(inputs) for inputs in (64, 128, 576, 1536, 4096)] == [64, 128, 96, 128, 128]
    assert [str(read_format(line)) for line in ("int4", "int4:group=128")] == ["int4", "int4:group=128"]
    own, asked = (models.load(folders["dense"], weights=line).params for line in ("int4", "int4:group=64"))
    jax.tree.map(np.testing.assert_array_equal, own["layers"][0]["attention"], asked["layers"][0]["attention"])
    with pytest.raises(ModelError, match="16 to 128 inputs do not divide every matrix .*577 inputs.*int4:group=0"):
        form.shapes({"layers": {0: {"up": {"kernel": jax.ShapeDtypeStruct((577, 8), jnp.float32)}}}})


@pytest.mark.parametrize(
    ("line", "said"),
    (
        ("int3", "unknown weights 'int3'; give int8, int4, fp8"),
        ("int4:size=32", "'size=32' is not a setting; give"),
        ("int4:group=-1", "'group=-1' is not a setting"),
        ("int8:vocab=perhaps", "'vocab=perhaps' is not a setting"),
        (
            "int4:group=128",
            r"groups of 128 inputs do not divide every matrix \(\d+ with 64 inputs, such as layers.0.attention.k.*\): "
            "give int4:group=64",
        ),
    ),
)
def test_what_no_format_is(folders, line, said):
    with pytest.raises(ModelError, match=said) as error:
        models.load(folders["dense"], weights=line)
    assert "\n" not in str(error.value)


def test_what_cannot_be_done_with_few_bits_is_refused_by_name(folders, tmp_path):
    model = models.load(folders["dense"], weights="int8")
    for layout in ("safetensors", "orbax"):
        with pytest.raises(ModelError, match="kept in few bits, and are not written: load it with weights='plain'"):
            models.save(tmp_path / layout, model.lm, model.params, layout=layout)
    with pytest.raises(ModelError, match="kept in few bits, and are not widened"):
        models.widen(model, 2)
    with pytest.raises(ModelError, match="kept in few bits, and are not put into another format"):
        models.quantised(model, "fp8")
    with pytest.raises(ModelError, match="DiffusionGemma mixes the rows of its table"):
        models.quantised(models.Model(DiffusionGemmaLM(None), {}), "int8:vocab=true")
    with pytest.raises(ModelError, match="are for models that load"):
        models.quantised(models.Model(object(), {}), "int8")


def test_another_type_keeps_the_values(folders):
    model = models.load(folders["dense"], weights="int8")
    cast = models.retyped(model, "bfloat16")
    kernel = cast.params["layers"][0]["mlp"]["up"]["kernel"]
    assert kernel.values is model.params["layers"][0]["mlp"]["up"]["kernel"].values
    assert {x.dtype for x in jax.tree.leaves(cast.params, is_leaf=is_quantised)} == {jnp.dtype("bfloat16")}


DRAFTING = ("prompt_lookup", "draft-top_k", "eagle2")


def said(decoder, params):
    return texts(decoding.run(decoder, params, start(decoder, HOT, model=params)))


def in_format(name, line):
    """The parameters of a drafter and its target, which alone is in few bits."""
    own = weights_of(name)
    return {**own, "target": read_format(line).params(own["target"])}


@pytest.mark.slow
@pytest.mark.parametrize("line", ("int4:group=16", "fp8:vocab=true"))
def test_drafters_keep_the_text_of_a_format(line):
    """Greedy rows and sampled ones; and it is another text than that of the plain weights."""
    plainly = specjax.speculative(SHALLOW)
    want = said(plainly, in_format("none", line))
    assert want != said(plainly, weights_of("none"))
    for name in DRAFTING:
        decoder = specjax.speculative(SHALLOW, decoder_on(MESHES["8x1"], name).drafter)
        same(said(decoder, in_format(name, line)), want)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "spec"), (("int4:group=16", "2x4"), ("int8", "1x8")))
def test_a_mesh_keeps_the_text_of_a_format(line, spec):
    want = said(specjax.speculative(SHALLOW), in_format("none", line))
    for name in ("none", *DRAFTING):
        decoder = decoder_on(MESHES[spec], name)
        same(said(decoder, placed(decoder, in_format(name, line))), want)
