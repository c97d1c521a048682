"""Models whose matrices are bfloat16 with coded exponents: the same numbers, the same text, less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import same, start, texts
from support.mesh_cases import HOT, SHALLOW
from support.mesh_cases import weights as weights_of
from support.shapes import changed, small

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, LlamaLM, ModelError
from specjax.models.dfloat11 import Coded
from specjax.models.few_bits import dot, is_quantised, plain, rows
from specjax.models.formats import read_format
from specjax.models.grouped import grouped_dot
from specjax.plan.held import chip_bytes
from specjax.sharding import make_mesh

LINE = "dfloat11:group=16,vocab=true"
SMALL = small(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, qkv_bias=True,
)  # fmt: skip
SPARSE = changed(SMALL, qkv_bias=False, qk_norm=True, experts=ExpertsConfig(4, 2, 32))


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))


def half(params, dtype=None):
    """Rounded to bfloat16, and in another type or in that."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype or jnp.bfloat16), params)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model and one with experts, on disk in bfloat16."""
    made = {}
    for name, config in (("dense", SMALL), ("experts", SPARSE)):
        made[name] = tmp_path_factory.mktemp("dfloat11") / name
        models.save(made[name], LlamaLM(config), half(LlamaLM(config).init(jax.random.key(0))))
    return made


@pytest.mark.parametrize("kind", ("dense", "experts"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_folder_comes_back_bit_for_bit(folders, kind, dtype):
    """On any mesh, with copies of kv-heads too; what is read is what is made of a read model, and what is planned in shape."""
    whole = models.load(folders[kind], dtype)
    model, want = models.load(folders[kind], dtype, weights=LINE), models.quantised(whole, LINE)
    assert model.weights == want.weights == LINE and f"weights in {LINE}" in repr(model)
    same_bits(model.params, want.params)
    back = jax.tree.map(plain, model.params, is_leaf=is_quantised)
    same_bits(back, whole.params)
    assert sum(isinstance(x, Coded) for x in jax.tree.leaves(model.params, is_leaf=is_quantised)) == 2 * 7 + 2
    planned = models.abstract(folders[kind], dtype, weights=LINE).params
    assert jax.tree.structure(planned) == jax.tree.structure(model.params)
    for spec in ("data=1,model=8", "data=2,model=4"):
        mesh = make_mesh(spec)
        read = models.load(folders[kind], dtype, mesh=mesh, weights=LINE)
        lm, params = models.spread(want.lm, want.params, mesh)
        assert lm == read.lm
        same_bits(read.params, params)
        for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(params), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        q = read.params["layers"][0]["attention"]["q"]["kernel"]
        assert {x.sharding.shard_shape(x.shape)[-1] for x in (q.rest, q.codes)} == {64 // mesh.shape["model"]}


@pytest.mark.slow
def test_products_are_those_of_the_plain_matrix():
    """Of rows, of groups of them, and under a mesh; of a table's rows; with derivatives of what is multiplied."""
    rng, counts = np.random.default_rng(0), np.asarray((1, 0, 9, 0, 3), np.int32)
    form, matrices = read_format("dfloat11:group=4"), half(jnp.asarray(rng.normal(size=(5, 8, 6))))
    coded, x = form.leaf(matrices, -2), jnp.asarray(rng.normal(size=(13, 8)), jnp.float32)
    want = np.stack([row @ m for row, m in zip(x, np.repeat(matrices, counts, 0).astype(np.float32), strict=True)])
    np.testing.assert_allclose(jax.jit(grouped_dot)(x, coded, counts), want, rtol=1e-5, atol=1e-5)
    with jax.sharding.use_abstract_mesh(make_mesh("data=1,model=2", jax.devices()[:2]).abstract_mesh):
        np.testing.assert_allclose(jax.jit(grouped_dot)(x, coded, counts), want, rtol=1e-5, atol=1e-5)
    one, table = form.leaf(matrices[0], -2), form.leaf(matrices[0].T, -1)
    sums = jax.jit(jax.grad(lambda x, kernel: jnp.sum(dot(x, kernel))))
    np.testing.assert_array_equal(sums(x, one), sums(x, matrices[0]))
    alone = lambda kernel: jax.vmap(lambda row: dot(row, kernel))(x)
    np.testing.assert_array_equal(alone(one), alone(matrices[0]))
    assert dot(x[:0], one).shape == (0, 6)
    ids = jnp.asarray([[4, 1], [0, 4]])
    np.testing.assert_array_equal(rows(table, ids), matrices[0].T[ids])


@pytest.mark.slow
def test_a_matrix_is_made_plain_just_before_it_is_used():
    """A loop of many passes has room for some matrices and not for all of them; and it writes the tokens of the plain ones."""
    lm = LlamaLM(changed(SMALL, num_hidden_layers=6, intermediate_size=1024))
    whole = half(lm.init(jax.random.key(0)))
    tokens, room = {}, {}

    def written(params, tokens):
        def step(_, tokens):
            positions = jnp.arange(tokens.shape[1])[None]
            block = Block(tokens, positions, jnp.zeros(1, jnp.int32), None, causal=True)
            logits = lm(params, block, None, wants=Wants(logits=True)).logits
            return jnp.concatenate([tokens[:, 1:], jnp.argmax(logits[:, -1:], -1).astype(jnp.int32)], 1)

        return jax.lax.fori_loop(0, 8, step, tokens)

    for name, params in (("plain", whole), ("coded", read_format("dfloat11:group=32,vocab=true").params(whole))):
        prompt = jnp.arange(4, dtype=jnp.int32)[None]
        program = jax.jit(written).lower(params, prompt).compile()
        room[name] = program.memory_analysis().temp_size_in_bytes
        tokens[name] = np.asarray(program(params, prompt)).tolist()
    assert room["coded"] < 6 * 2 * 64 * 1024  # of 18, with what becomes one on the way; a CPU widens it
    assert tokens["coded"] == tokens["plain"] and len(set(tokens["plain"][0])) > 1


def test_a_mesh_moves_no_part_of_a_matrix():
    """What devices exchange is what they do for the plain model: sums of a layer's outputs."""
    lm, mesh = LlamaLM(changed(SMALL, num_hidden_layers=1)), make_mesh("data=2,model=4")
    whole, exchanged = half(lm.init(jax.random.key(0))), []
    block = Block(jnp.ones((2, 3), jnp.int32), jnp.arange(6).reshape(2, 3), jnp.zeros(2, jnp.int32), None, causal=True)
    for params in (whole, read_format("dfloat11:group=16").params(whole)):
        wide, placed = models.spread(lm, params, mesh)

        def logits(params, wide=wide):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return wide(params, block, None, wants=Wants(logits=True)).logits

        text = jax.jit(logits).lower(placed).compile().as_text()
        exchanged.append(set(re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-scatter)\(", text)))
    assert exchanged[0] == exchanged[1] != set()


@pytest.mark.slow
def test_drafters_write_the_text_of_bfloat16():
    """Greedy rows and sampled ones; the target's are coded, or not."""
    own = half(weights_of("none"), jnp.float32)
    coded = {**own, "target": read_format("dfloat11:group=16,vocab=true").params(own["target"])}
    plainly = specjax.speculative(SHALLOW)
    said = lambda decoder, params: texts(decoding.run(decoder, params, start(decoder, HOT, model=params)))
    want = said(plainly, own)
    same(said(plainly, coded), want)
    same(said(specjax.speculative(SHALLOW, specjax.draft.PromptLookup()), coded), want)


def test_what_it_takes():
    """A byte, three bits and what a run's last word leaves empty; a plan counts the words of usual numbers."""
    numbers = half(0.02 * jax.random.normal(jax.random.key(0), (1024, 512)))
    coded = read_format("dfloat11").leaf(numbers, -2)
    assert 10.6 < 8 * chip_bytes(coded) / numbers.size < 11.3
    shape = lambda kind, form: chip_bytes(models.abstract("meta-llama/Llama-3.1-8B", kind, weights=form).params) / 1e9
    assert shape("bfloat16", "dfloat11:vocab=true") == pytest.approx(8.03 * 11.25 / 8, abs=0.02)
    assert chip_bytes(coded) <= chip_bytes(read_format("dfloat11").shape(numbers, -2))


def test_what_is_not_kept_in_it_is_named(folders, tmp_path):
    whole = models.load(folders["dense"], "float32")
    models.save(tmp_path / "fine", whole.lm, jax.tree.map(lambda x: x * 1.001, whole.params), dtype="float32")
    for work in (
        lambda: models.load(tmp_path / "fine", "float32", weights=LINE),
        lambda: models.quantised(models.load(tmp_path / "fine", "float32"), LINE),
    ):
        with pytest.raises(
            ModelError, match="holds numbers of bfloat16, and the model's are others: load it with dtype"
        ):
            work()
    rounded = models.load(tmp_path / "fine", "bfloat16")
    read = models.load(tmp_path / "fine", "bfloat16", weights=LINE)
    same_bits(jax.tree.map(plain, read.params, is_leaf=is_quantised), rounded.params)
    with pytest.raises(ModelError, match="groups of 128 inputs do not divide every matrix .*: give dfloat11:group=64"):
        models.load(folders["dense"], "bfloat16", weights="dfloat11:group=128")
    with pytest.raises(ModelError, match="kept in few bits, and are not written"):
        models.save(tmp_path / "coded", read.lm, read.params)
    cast = models.retyped(read, "float32")
    assert {x.dtype for x in jax.tree.leaves(cast.params, is_leaf=is_quantised)} == {jnp.dtype("float32")}
    same_bits(jax.tree.map(plain, cast.params, is_leaf=is_quantised), half(rounded.params, jnp.float32))
