"""Meshes change where numbers live, never which tokens come out."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import small_diffusion as small
from support.conformance import (
    ALIKE,
    CONFIG,
    DRAFT,
    DRAFTERS,
    MIXED,
    PREFIX,
    TARGET,
    VERIFIERS,
    but_slow,
    complete,
    params,
    plain,
    same,
)
from support.mesh_cases import SHALLOW, placed, weights
from support.shapes import changed

import specjax
from specjax.diffusion import NoCache, Prefix, Threshold, partial_pass
from specjax.draft import Clover2, Kangaroo, ModelDrafter
from specjax.draft.heads.folder import save_head
from specjax.models.kv_heads import merged
from specjax.models.llama import LlamaLM
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh, shardings
from specjax.sharding.rules import partition

SPECS = {"2x4": "data=2,model=4", "1x8": "model=8", "8x1": "data=8"}


def decoder_on(spec, name):
    """A drafter of the table on a mesh."""
    return specjax.speculative(TARGET, DRAFTERS[name], mesh=make_mesh(spec))


@pytest.mark.parametrize("spec", but_slow(SPECS.values(), "model=8", "data=8"), ids=SPECS)
def test_mesh_keeps_the_text(spec):
    """With every warper in use; `test_every_drafter_*.py` has the other drafters."""
    decoder = decoder_on(spec, "none")
    mesh = decoder.mesh
    got, state = complete(DRAFTERS["none"], MIXED, model=placed(decoder, params("none")), mesh=mesh)
    same(got, plain())
    rows = state.tokens.addressable_shards[0].data.shape[0]
    assert rows == len(MIXED.prompts) // mesh.shape["data"]
    assert len(state.cache.key[0].sharding.device_set) == 8


@pytest.mark.slow
def test_mesh_keeps_the_text_behind_a_shared_prefix():
    """One row's state is copied into rows that lie on other devices."""
    decoder = decoder_on("data=2,model=4", "draft-top_k")
    model = placed(decoder, params("draft-top_k"))
    got, _ = complete(DRAFTERS["draft-top_k"], ALIKE, model=model, mesh=decoder.mesh, prefix=PREFIX)
    same(got, plain(ALIKE))


@pytest.mark.slow
def test_mesh_keeps_the_text_of_a_tree():
    decoder = decoder_on("data=2,model=4", "draft-top_k")
    got, _ = complete(DRAFTERS["draft-top_k"], MIXED, model=placed(decoder, params("draft-top_k")), mesh=decoder.mesh)
    same(got, plain())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "name"),
    [("k_seq", "draft-iid"), *((rule, "draft-without_replacement") for rule in ("recursive_wor", "traversal"))],
)
def test_mesh_keeps_the_text_of_verifiers_of_trees(verifier, name):
    """The text of one device by the same rule, which is not plain decoding's."""
    rows = dataclasses.replace(MIXED, new_tokens=8)
    alone, _ = complete(DRAFTERS[name], rows, VERIFIERS[verifier])
    decoder = decoder_on("data=2,model=4", name)
    got, _ = complete(DRAFTERS[name], rows, VERIFIERS[verifier], model=placed(decoder, params(name)), mesh=decoder.mesh)
    same(got, alone)


@pytest.mark.slow
def test_rows_that_the_mesh_does_not_divide_are_computed_everywhere():
    decoder = decoder_on("data=2,model=4", "none")
    rows = MIXED.pick(0, 2, 5)
    got, state = complete(DRAFTERS["none"], rows, model=placed(decoder, params("none")), mesh=decoder.mesh)
    same(got, [plain()[row] for row in (0, 2, 5)])
    assert state.tokens.sharding.is_fully_replicated


def test_weights_are_split():
    layer = placed(decoder_on("data=2,model=4", "none"), params("none"))["target"]["layers"][0]
    assert layer["attention"]["q"]["kernel"].sharding.spec == P(None, "model")
    assert layer["mlp"]["down"]["kernel"].sharding.spec == P("model", None)
    share = layer["mlp"]["down"]["kernel"].addressable_shards[0].data.shape
    assert share == (CONFIG.dense.intermediate_size // 4, CONFIG.hidden_size)


def split(decoder, name):
    """Which dimensions of a drafter's parameters are split, by the parameters' names; without those that are not."""
    own = decoder.param_shardings(params(name))["draft"]
    named = {jax.tree_util.keystr(path): tuple(x.spec) for path, x in jax.tree_util.tree_leaves_with_path(own)}
    return {name: spec for name, spec in named.items() if any(spec)}


def test_heads_are_split_as_the_target_is():
    """One rule by the names of modules: heads, MLPs and vocabularies over `model`."""
    rows, columns = ("model", None), (None, "model")
    layer = {
        **{f"['{name}']['kernel']": columns for name in ("q", "k", "v")},
        "['o']['kernel']": rows,
    }
    attention = {f"['attention']{name}": spec for name, spec in layer.items()}
    mlp = {f"['mlp']['{name}']['kernel']": rows if name == "down" else columns for name in ("gate", "up", "down")}
    wanted = {
        "medusa": {f"['heads'][{i}]['kernel']": columns for i in range(3)},
        "eagle1": {f"['layer']{name}": spec for name, spec in (attention | mlp).items()},
        "eagle3": attention | mlp | {"['head']['kernel']": columns},
        "kangaroo": attention,
        "ppd": {},
        "hidden_transfer": {},
    }
    for name, specs in wanted.items():
        assert split(decoder_on("data=2,model=4", name), name) == specs, name


def test_whole_heads_stay_together_in_a_heads_layers():
    """Four kv-heads of 8 columns divide by eight, and are not torn."""
    found = split(decoder_on("model=8", "eagle1"), "eagle1")
    assert found["['layer']['attention']['q']['kernel']"] == (None, "model")
    assert "['layer']['attention']['k']['kernel']" not in found


def test_the_parts_of_a_fused_drafter_lie_as_they_say():
    found = split(decoder_on("data=2,model=4", "fuse"), "fuse")
    assert found["[1]['layers'][0]['mlp']['down']['kernel']"] == ("model", None)
    assert found["[1]['embed']['embedding']"] == ("model", None)


def test_a_drafts_cache_goes_by_its_own_heads():
    """The target has four kv-heads, which a mesh of eight cannot split, and the draft eight, which it can."""
    draft = LlamaLM(changed(DRAFT.config, num_key_value_heads=8))
    decoder = specjax.speculative(TARGET, ModelDrafter(draft), mesh=make_mesh("model=8"))
    model = {"target": TARGET.abstract(), "draft": draft.abstract()}
    state = jax.eval_shape(lambda model: decoder.empty(model, 8, 64), model)
    places = shardings(decoder.mesh, decoder.axes(state), state)
    kernel = decoder.param_shardings(model)["draft"]["layers"][0]["attention"]["k"]["kernel"]
    assert kernel.spec == P(None, "model") and places.draft.cache.key[0].spec[:2] == ("data", "model")
    assert places.cache.key[0].spec[:2] == ("data", None)


def test_an_engine_places_a_drafter_that_it_is_given():
    model = specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))
    engine = Engine(model, mesh="data=2,model=4", drafter=(DRAFTERS["medusa"], params("medusa")["draft"]))
    assert engine.params["draft"]["heads"][0]["kernel"].sharding.spec == P(None, "model")
    with pytest.raises(ValueError, match="this decoder has no mesh"):
        Engine(model).decoder.param_shardings(engine.params)


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
    model = specjax.models.Model(SHALLOW, weights("none")["target"], None, (), "toy", None, np.dtype("float32"))
    wanted = [r.tokens for r in specjax.generate(model, prompts, drafter="prompt_lookup:length=1", max_new_tokens=12)]
    got = specjax.generate(model, prompts, drafter="prompt_lookup:length=1", max_new_tokens=12, mesh="data=2,model=4")
    assert [r.tokens for r in got] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("cache", (Prefix(), NoCache()), ids=("prefix", "none"))
def test_mesh_keeps_a_diffusion_models_text(cache):
    """Rows lie over `data`, in the state that comes out too."""
    mesh, weights = make_mesh("data=2,model=4"), small.params()["target"]
    decoder = dataclasses.replace(small.make(Threshold(0.5)), cache=cache)
    want = small.texts(specjax.run(decoder, small.params(), small.begin(decoder)))
    there = {
        "target": jax.device_put(weights, shardings(mesh, small.LM.axes(weights), weights, small.LM.axis_counts()))
    }
    decoder = dataclasses.replace(decoder, mesh=mesh)
    state = specjax.run(decoder, there, small.begin(decoder, model=there))
    assert small.texts(state) == want
    assert state.tokens.sharding.spec == P("data") and state.tokens.addressable_shards[0].data.shape[0] == 2
    assert cache == NoCache() or state.cache.key[0].sharding.spec[0] == "data"


@pytest.mark.slow
@pytest.mark.parametrize("line", ("model=2", "context=2"))
def test_mesh_keeps_the_text_where_rows_are_read_apart(line, monkeypatch):
    """Rows that enter a block are read one by one, where the mesh does not split rows."""
    monkeypatch.setattr(partial_pass, "TOGETHER", 1)
    mesh, weights = make_mesh(line, jax.devices()[:2]), small.params()["target"]
    decoder = dataclasses.replace(small.make(Threshold(0.5)), cache=Prefix())
    want = small.texts(specjax.run(decoder, small.params(), small.begin(decoder)))
    places = shardings(mesh, small.LM.axes(weights), weights, small.LM.axis_counts())
    there = {"target": jax.device_put(weights, places)}
    decoder = dataclasses.replace(decoder, mesh=mesh)
    assert small.texts(specjax.run(decoder, there, small.begin(decoder, model=there))) == want


@pytest.mark.slow
def test_a_loaded_head_lies_where_its_drafter_says():
    mesh = make_mesh("data=2,model=4")
    target = specjax.models.load("tiny", mesh=mesh)
    drafter, loaded = specjax.assembly.registry.build_drafter("eagle3", target, mesh=mesh)
    places = drafter.param_shardings(mesh, loaded)
    assert loaded["mlp"]["down"]["kernel"].sharding.spec == P("model", None)
    jax.tree.map(lambda x, place: np.testing.assert_(x.sharding == place), loaded, places)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("kangaroo", Kangaroo), ("clover2", Clover2)])
def test_heads_made_of_target_layers_have_no_copies(name, kind, tmp_path):
    """A head's folder fits the shipped target on a mesh wider than its kv-heads."""
    narrow, wide = specjax.models.load("tiny"), specjax.models.load("tiny", mesh=make_mesh("model=8"))
    own = kind().bind(narrow.lm).init_params(jax.random.key(0), narrow.params)
    save_head(tmp_path, name, {}, own, narrow)
    drafter, loaded = specjax.assembly.registry.build_drafter(f"{name}:model={tmp_path}", wide)
    start = drafter.init_params(jax.random.key(0), wide.params)
    assert wide.lm.kv_copies > 1
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), start, loaded)


@pytest.mark.slow
def test_kv_heads_are_copied_for_a_wider_mesh():
    """Every chip holds the one kv-head that its query heads share, and the text stays."""
    model = specjax.models.Model(SHALLOW, weights("none")["target"], None, (), "toy", None, np.dtype("float32"))
    one = Engine(model, drafter="prompt_lookup:length=1")
    wide = Engine(model, mesh="model=8", drafter="prompt_lookup:length=1")
    assert (SHALLOW.config.near.num_key_value_heads, wide.model.lm.kv_copies) == (4, 2)
    asked = [one.request(prompt, max_new_tokens=12) for prompt in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 6, 7])]
    cache = wide.start(asked).cache.key[0]
    assert cache.shape[1] == 8 and cache.addressable_shards[0].data.shape[1] == 1
    assert [r.tokens for r in wide.run(asked)] == [r.tokens for r in one.run(asked)]
    back = merged(wide.model.params, SHALLOW.config, 2)
    jax.tree.map(np.testing.assert_array_equal, back, model.params)
