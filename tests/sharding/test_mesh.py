"""Meshes change where numbers live, never which tokens come out."""

import dataclasses

import canvas
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from laws import ALIKE, CONFIG, DRAFTERS, MIXED, PREFIX, TARGET, complete, mostly_slow, params, plain, same

import specjax
from specjax.diffusion import NoCache, Prefix, Threshold
from specjax.engine import Engine
from specjax.models.kv_heads import merged
from specjax.sharding import make_mesh, shardings
from specjax.sharding.rules import partition

MESHES = {"8x1": "data=8", "1x8": "model=8", "2x4": "data=2,model=4"}


def placed(mesh, name="draft-chain"):
    """The parameters of a drafter of the table and of its target on the mesh; those of heads are replicated."""
    counts, model = TARGET.axis_counts(), params(name)
    axes = {"target": TARGET.axes(model["target"])}
    if name.startswith("draft"):
        axes["draft"] = TARGET.axes(model["draft"])
    else:
        axes["draft"] = jax.tree.map(lambda x: (None,) * x.ndim, model["draft"])
    return jax.tree.map(jax.device_put, model, shardings(mesh, axes, model, counts))


@pytest.mark.parametrize("spec", mostly_slow(MESHES.values(), MESHES["2x4"]), ids=MESHES)
@pytest.mark.parametrize("name", ("none", "draft-top_k"))
def test_mesh_keeps_the_text(name, spec):
    mesh = make_mesh(spec)
    got, state = complete(DRAFTERS[name], MIXED, model=placed(mesh, name), mesh=mesh)
    same(got, plain())
    rows = state.tokens.addressable_shards[0].data.shape[0]
    assert rows == len(MIXED.prompts) // mesh.shape["data"]
    assert len(state.cache.key[0].sharding.device_set) == 8


@pytest.mark.slow
def test_mesh_keeps_the_text_behind_a_shared_prefix():
    """One row's state is copied into rows that lie on other devices."""
    mesh = make_mesh("data=2,model=4")
    got, _ = complete(DRAFTERS["draft-top_k"], ALIKE, model=placed(mesh, "draft-top_k"), mesh=mesh, prefix=PREFIX)
    same(got, plain(ALIKE))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in DRAFTERS if n not in ("none", "draft-top_k")])
def test_mesh_keeps_the_text_of_every_drafter(name):
    mesh = make_mesh("data=2,model=4")
    got, _ = complete(DRAFTERS[name], MIXED, model=placed(mesh, name), mesh=mesh)
    same(got, plain())


def test_weights_are_split():
    mesh = make_mesh("data=2,model=4")
    layer = placed(mesh)["target"]["layers"][0]
    assert layer["attention"]["q"]["kernel"].sharding.spec == P(None, "model")
    assert layer["mlp"]["down"]["kernel"].sharding.spec == P("model", None)
    share = layer["mlp"]["down"]["kernel"].addressable_shards[0].data.shape
    assert share == (CONFIG.intermediate_size // 4, CONFIG.hidden_size)


def test_what_does_not_divide_is_replicated():
    mesh = make_mesh("model=8")
    counts = TARGET.axis_counts()  # 8 heads, 4 kv-heads
    assert partition(mesh, ("embed", "heads"), (64, 64), counts) == P(None, "model")
    assert partition(mesh, ("embed", "kv_heads"), (64, 32), counts) == P(None, None)
    assert partition(mesh, ("vocab", "embed"), (97, 64), counts) == P(None, None)
    assert partition(mesh, (None, "unheard_of"), (8, 8), counts) == P(None, None)


def test_a_clash_of_rules_names_both_axes():
    mesh = make_mesh("data=2,model=4")
    with pytest.raises(ValueError, match="'heads' and 'mlp' .* both want the mesh axis 'model'"):
        partition(mesh, ("heads", "mlp"), (8, 8), {})
    assert partition(mesh, ("heads", "mlp"), (8, 6), {}) == P("model", None)  # the second is replicated anyway


@pytest.mark.parametrize("spec", ("data=3", "data=16", "model=0", "rows=8", "data", "data=2;model=4"))
def test_bad_meshes_are_refused(spec):
    with pytest.raises(ValueError, match="mesh"):
        make_mesh(spec)


@pytest.mark.slow
def test_generate_takes_a_mesh():
    prompts = [list(range(1, 9)), [5, 6, 7]]
    model = specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))
    wanted = [r.tokens for r in specjax.generate(model, prompts, drafter="prompt_lookup", max_new_tokens=12)]
    got = specjax.generate(model, prompts, drafter="prompt_lookup", max_new_tokens=12, mesh="data=2,model=4")
    assert [r.tokens for r in got] == wanted


@pytest.mark.parametrize("cache", (Prefix(), NoCache()), ids=("prefix", "none"))
def test_mesh_keeps_a_diffusion_models_text(cache):
    """Rows lie over `data`, in the state that comes out too."""
    mesh, weights = make_mesh("data=2,model=4"), canvas.params()["target"]
    decoder = dataclasses.replace(canvas.make(Threshold(0.5)), cache=cache)
    want = canvas.texts(specjax.run(decoder, canvas.params(), canvas.begin(decoder)))
    there = {
        "target": jax.device_put(weights, shardings(mesh, canvas.LM.axes(weights), weights, canvas.LM.axis_counts()))
    }
    decoder = dataclasses.replace(decoder, mesh=mesh)
    state = specjax.run(decoder, there, canvas.begin(decoder, model=there))
    assert canvas.texts(state) == want
    assert state.tokens.sharding.spec == P("data") and state.tokens.addressable_shards[0].data.shape[0] == 2
    assert cache == NoCache() or state.cache.key[0].sharding.spec[0] == "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("kangaroo", "clover2"))
def test_heads_made_of_target_layers_have_no_copies(name):
    """The shipped heads fit the shipped target on a mesh wider than its kv-heads."""
    wide = specjax.models.load("pycode", mesh=make_mesh("model=8"))
    drafter, loaded = specjax.registry.build_drafter(name, wide)
    start = drafter.init_params(jax.random.key(0), wide.params)
    assert wide.lm.kv_copies > 1
    own = {part: loaded[part] for part in start}  # a shipped head may add a trimmed vocabulary
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), start, own)


def test_kv_heads_are_copied_for_a_wider_mesh():
    """Every chip holds the one kv-head that its query heads share, and the text stays."""
    model = specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))
    one = Engine(model, "prompt_lookup")
    wide = Engine(model, "prompt_lookup", mesh="model=8")
    assert (TARGET.config.num_key_value_heads, wide.model.lm.kv_copies) == (4, 2)
    asked = [one.request(prompt, max_new_tokens=12) for prompt in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 6, 7])]
    cache = wide.start(asked).cache.key[0]
    assert cache.shape[1] == 8 and cache.addressable_shards[0].data.shape[1] == 1
    assert [r.tokens for r in wide.run(asked)] == [r.tokens for r in one.run(asked)]
    back = merged(wide.model.params, CONFIG, 2)
    jax.tree.map(np.testing.assert_array_equal, back, model.params)
