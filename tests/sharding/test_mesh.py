"""Meshes change where numbers live, never which tokens come out."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from laws import CONFIG, DRAFTERS, MIXED, TARGET, complete, mostly_slow, params, plain, same

import specjax
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


@pytest.mark.parametrize("spec", ("data=3", "data=16", "model=0", "rows=8", "data", "data=2;model=4"))
def test_bad_meshes_are_refused(spec):
    with pytest.raises(ValueError, match="mesh"):
        make_mesh(spec)


def test_generate_takes_a_mesh():
    prompts = [list(range(1, 9)), [5, 6, 7]]
    model = specjax.models.Model(TARGET, params()["target"], None, (), "toy", None, np.dtype("float32"))
    wanted = [r.tokens for r in specjax.generate(model, prompts, drafter="prompt_lookup", max_new_tokens=12)]
    got = specjax.generate(model, prompts, drafter="prompt_lookup", max_new_tokens=12, mesh="data=2,model=4")
    assert [r.tokens for r in got] == wanted
