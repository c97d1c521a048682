"""Training of compressed experts: the command, all weights or the vectors alone, and what it refuses."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_target as small
from support import small_training as tiny
from support.objectives import packed

from specjax import cli, models
from specjax.assembly import registry
from specjax.draft.main_experts.objective import TrainCompressedExperts
from specjax.models import ExpertsConfig, routing
from specjax.objectives.next_token import NextToken

LM = small.with_experts(tiny.TARGET)


def params():
    return jax.jit(LM.init)(jax.random.key(1))


def training(folder):
    """`specjax train` of a mixture of experts, or of another target in the folder."""
    tiny.training(folder)
    models.save(folder / "experts", LM, params())

    def run(*line, target="experts", output="out"):
        words = ["--target", folder / target, "--data", folder / "data.jsonl", "--output", folder / output]
        words += ["--steps", 2, "--batch-size", 4, "--length", 12]
        return cli.main([str(word) for word in ("train", *line, *words)])

    return run


@pytest.mark.slow
def test_the_loss_is_that_of_the_model_with_vectors():
    """The vectors alone have the gradient that they have among all weights."""
    lm, target = routing.compressed(LM, 1, "a test"), params()
    vectors = routing.ones(LM)
    both = TrainCompressedExperts(lm), TrainCompressedExperts(lm, only_vectors=True)
    whole = both[0].init(jax.random.key(0), target)
    jax.tree.map(np.testing.assert_array_equal, whole, routing.joined(target, vectors))
    jax.tree.map(np.testing.assert_array_equal, both[1].init(jax.random.key(0), target), vectors)
    loss = lambda objective, target: jax.jit(
        jax.value_and_grad(lambda p: objective.loss(p, target, packed(), jax.random.key(0))[0])
    )
    (a, of_all), (b, own), (c, _) = (
        loss(both[0], None)(whole), loss(both[1], target)(vectors), loss(NextToken(lm), None)(whole),
    )  # fmt: skip
    assert float(a) == pytest.approx(float(b), rel=1e-5) and float(a) == pytest.approx(float(c), rel=1e-5)
    for i, layer in own["layers"].items():
        np.testing.assert_allclose(layer["mlp"]["ces"], of_all["layers"][i]["mlp"]["ces"], atol=1e-6)
        assert float(jnp.abs(layer["mlp"]["ces"]).max()) > 1e-4


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    run = training(tmp_path)
    assert run("compressed_experts:n_ce=1") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["use_ce"], config["n_ce"]) == (True, 1)
    whole = models.load(tmp_path / "out", dtype="float32")
    assert whole.lm.config.experts.main == 1
    began = routing.joined(params(), routing.ones(LM))["layers"][0]["mlp"]
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), whole.params["layers"][0]["mlp"], began)
    assert 0 < moved["ces"] < 0.1 and 0 < moved["experts"]["up"]["kernel"] < 0.1
    capsys.readouterr()
    assert run("compressed_experts:only_vectors=true", output="vectors") == 0
    target = models.load(tmp_path / "experts", dtype="float32")
    drafter, own = registry.build_drafter(f"main_experts:vectors={tmp_path / 'vectors'}", target)
    assert drafter.target == routing.compressed(target.lm, 1, "a test")
    assert all(0 < float(jnp.abs(x - 1).max()) < 0.1 for x in jax.tree.leaves(own))


@pytest.mark.slow
def test_refused(tmp_path, capsys):
    run = training(tmp_path)
    lm = routing.compressed(LM, 1, "a test")
    models.save(tmp_path / "done", lm, routing.joined(params(), routing.ones(LM)))
    wide = small.with_experts(tiny.TARGET)
    wide = wide.__class__(wide.config.every(ExpertsConfig, moe_intermediate_size=64))
    models.save(tmp_path / "wide", wide, jax.jit(wide.init)(jax.random.key(1)))
    for words, target, said in (
        (("compressed_experts:n_ce=2",), "experts", "n_ce must be from 1 to 1 of the 2 experts of a token, got 2"),
        (("compressed_experts:n_ce=-1",), "experts", "n_ce must be from 1 to 1"),
        (("compressed_experts:n=2",), "experts", "has no field 'n'"),
        (("compressed_experts", "--loss", "tvd"), "experts", "--loss is not for compressed_experts"),
        (("compressed_experts", "--draft", "tiny-draft"), "experts", "--draft is not for compressed_experts"),
        (("compressed_experts", "--weights", "int8"), "experts", "in few bits .int8. have none: leave out --weights"),
        (("compressed_experts:only_vectors=true", "--weights", "int8"), "experts", "in few bits .int8. have none"),
        (("compressed_experts",), "target", "chooses among a model's experts, and this one has none"),
        (("compressed_experts",), "done", "has compressed experts already: `specjax train lm` goes on"),
        (("compressed_experts",), "wide", "vectors cannot stand for experts wider .64. than the model .32."),
    ):
        assert run(*words, target=target) == 2
        assert re.search(said, capsys.readouterr().err), said
