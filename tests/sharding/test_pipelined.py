"""A drafter on a mesh of its own: the same texts, blocks that are known before any pass, and what cannot be, in one line."""

import jax
import pytest
from support import conformance
from support.compiled import optimised

import specjax
from specjax import Engine, models, pipelined
from specjax.serve.disaggregated import disjoint
from specjax.serve.pipelined import PipelinedEngine
from specjax.sharding import make_mesh
from specjax.verify import Rejection

ROWS = conformance.MIXED.pick(0, 2, 3, 6)


def meshes(target="model=2", draft="model=1"):
    devices = jax.devices()
    return make_mesh(target, devices[:2]), make_mesh(draft, devices[2:3])


def on_two(name, verifier=None):
    """A line of the conformance table on two meshes: the decoder and its parameters."""
    mesh, side = meshes()
    drafter = conformance.DRAFTERS[name]
    decoder = specjax.speculative(conformance.TARGET, drafter, verifier, mesh=mesh)
    params = conformance.params_of(drafter)
    target = jax.device_put(params["target"], decoder.param_shardings(params)["target"])
    return pipelined.pipelined(decoder, params | {"target": target}, side)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["saguaro", "mirror_sd", "draft-top_k", "eagle3-top_k", "suffix-shared", "token_recycling"]
)
def test_texts_are_those_of_plain_decoding(name):
    """Drafters that draft ahead, by turns, over features of prompts and steps, from shared tables, and from rejected nodes."""
    decoder, params = on_two(name)
    texts, state = conformance.ended(decoder, params, ROWS)
    conformance.same(texts, conformance.plain(ROWS))
    assert int(state.stats.steps.sum()) < sum(map(len, texts))
    assert {d.id for d in state.tokens.devices()} == {0, 1} and {d.id for d in state.draft.tokens.devices()} == {2}
    assert state.draft.length.tolist() == state.length.tolist()  # both meshes know the same text


@pytest.mark.slow
def test_distributions_cross_too():
    """Under `rejection` the drafts' distributions are handed over, and steps are those of one mesh."""
    decoder, params = on_two("pearl", Rejection())
    texts, state = conformance.ended(decoder, params, ROWS)
    wanted, alone = conformance.complete(conformance.DRAFTERS["pearl"], ROWS, Rejection())
    conformance.same(texts, wanted)
    assert int(state.stats.steps.sum()) == int(alone.stats.steps.sum())


@pytest.mark.slow
def test_a_block_is_known_without_a_pass_and_a_second_run_compiles_nothing():
    decoder, params = on_two("pearl")
    texts, state = conformance.ended(decoder, params, ROWS)
    conformance.same(texts, conformance.plain(ROWS))
    side = decoder._split(params)[1]
    assert " dot(" not in optimised(pipelined._known.lower(decoder.drafting, side, state.draft)).as_text()
    tree = pipelined._known(decoder.drafting, side, state.draft)
    assert " dot(" in optimised(pipelined._ahead.lower(decoder.drafting, side, state.draft, tree, None)).as_text()
    programs = (pipelined._known, pipelined._ahead, pipelined._judged, pipelined._followed)
    before = [program._cache_size() for program in programs]
    again, params = on_two("pearl")
    assert conformance.ended(again, params, ROWS)[0] == texts
    assert [program._cache_size() for program in programs] == before


@pytest.mark.slow
def test_a_job_on_two_meshes():
    """Five requests, two rows: those that enter while others decode."""
    model = models.load("tiny", dtype="float32")
    prompts = [[(7 * i + j * j) % 500 + 4 for j in range(3 + 5 * i)] for i in range(5)]
    found = []
    for engine in (PipelinedEngine(model, "pearl", mesh="model=1", draft_mesh="model=1"), Engine(model, "none")):
        asked = [engine.request(p, max_new_tokens=9, temperature=1.0, seed=3, ignore_eos=True) for p in prompts]
        found.append([record.tokens for record in engine.run(asked, batch_size=2)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_new_parameters_reach_the_other_mesh():
    model = models.load("tiny", dtype="float32")
    engine = PipelinedEngine(model, "eagle3", mesh="model=1", draft_mesh="model=1")
    kept = [leaf is not None for leaf in jax.tree.leaves(engine.params["beside"], is_leaf=lambda leaf: leaf is None)]
    engine.update(jax.tree.map(lambda x: 2 * x, model.params))
    leaves = jax.tree.leaves(engine.params["beside"], is_leaf=lambda leaf: leaf is None)
    assert any(kept) and [leaf is not None for leaf in leaves] == kept
    for new, old in zip(leaves, jax.tree.leaves(model.params), strict=True):
        assert new is None or (new == jax.device_put(2 * old, new.sharding)).all()
    with pytest.raises(ValueError, match="reads every prompt as a whole: leave the shared prefix out"):
        list(engine.run([engine.request([5, 6, 7])], shared_prefix=True))
    with pytest.raises(ValueError, match="reads every prompt as a whole: leave the prefix cache out"):
        PipelinedEngine(model, "pearl", mesh="model=1", draft_mesh="model=1", prefix_cache="64MB")


@pytest.mark.parametrize(
    "name, why",
    [
        ("none", "there is no drafter for a mesh of its own: name one, or leave the draft mesh out"),
        ("kangaroo", "kangaroo cannot have a mesh of its own, since it gives its target more than a tree"),
        (
            "longspec",
            "longspec cannot have a mesh of its own, since it reads its target's cache: choose one with a model",
        ),
    ],
)
def test_drafters_that_need_their_target_are_refused(name, why):
    with pytest.raises(ValueError, match=why):
        on_two(name)


def test_a_line_may_name_its_platform():
    first, second = disjoint("cpu:model=2", "data=3", "draft_mesh")
    assert [d.id for d in first.devices.flat] == [0, 1] and [d.id for d in second.devices.flat] == [2, 3, 4]
    assert (first.shape["model"], second.shape["data"]) == (2, 3)


def test_bad_meshes_are_said_in_one_line():
    mesh, _ = meshes()
    decoder = specjax.speculative(conformance.TARGET, conformance.DRAFTERS["pearl"], mesh=mesh)
    for of, side in ((decoder, mesh), (specjax.speculative(conformance.TARGET), mesh)):
        with pytest.raises(ValueError, match="needs a decoder on another one: give mesh and draft_mesh"):
            pipelined.pipelined(of, conformance.params("pearl"), side)
    with pytest.raises(ValueError, match="mesh 'model=5' asks for 5 devices and 4 are left"):
        PipelinedEngine("tiny", "pearl", mesh="model=4", draft_mesh="model=5")
    with pytest.raises(ValueError, match="JAX has no platform 'abacus' here"):
        PipelinedEngine("tiny", "pearl", mesh="abacus:model=1", draft_mesh="model=1")
