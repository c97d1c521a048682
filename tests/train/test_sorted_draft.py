"""Training of S2D's draft models: the loss, the command, and one draft for two targets."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from support import small_target as small
from support import small_training as tiny
from support.conformance import texts
from support.objectives import packed
from support.shapes import changed

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.assembly import registry
from specjax.draft.s2d.folder import EXITS
from specjax.draft.s2d.objective import TrainS2D
from specjax.models import LlamaLM
from specjax.objectives.next_token import NextToken


def first(lm, weights, count):
    """The model of the first layers, and its parameters."""
    few = LlamaLM(changed(lm.config, num_hidden_layers=count))
    return few, {**weights, "layers": {i: weights["layers"][i] for i in range(count)}}


@pytest.mark.slow
def test_the_loss_is_the_sum_of_those_of_the_models_of_the_first_layers():
    lm, weights = tiny.TARGET, tiny.target_params()
    loss, metrics = jax.jit(lambda p, b: TrainS2D(lm, (1, 2)).loss(p, None, b, None))(weights, packed())
    total = 0.0
    for count in (1, 2):
        few, own = first(lm, weights, count)
        part, told = jax.jit(lambda p, b, few=few: NextToken(few).loss(p, None, b, None))(own, packed())
        assert float(metrics[f"accuracy_{count}"]) == pytest.approx(float(told["accuracy"]), abs=1e-6)
        total += float(part)
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert float(metrics["perplexity"]) == pytest.approx(float(told["perplexity"]), rel=1e-4)


@pytest.mark.slow
def test_the_command_trains_the_first_layers_of_a_target(tmp_path, capsys):
    run = tiny.training(tmp_path)
    for words, said in (
        (("s2d",), "s2d begins with the first of .* 2 layers: say which with s2d:exits="),
        (("s2d:exits=",), "say which with s2d:exits="),
        (("s2d:exits=1 4",), "ascend from 1 to at most the 2 layers of target, got .1, 4."),
        (("s2d:exits=0",), "ascend from 1 to at most the 2 layers of target, got .0,."),
        (("s2d:exits=2 1",), "ascend from 1 to at most the 2 layers of target, got .2, 1."),
        (("s2d:exits=1", "--loss", "tvd"), "--loss is not for s2d"),
    ):
        assert run(*words) == 2
        assert re.search(said, capsys.readouterr().err)
    assert run("s2d:exits=1") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config[EXITS]) == (1, [1])
    target = models.load(tmp_path / "target")
    drafter, own = registry.build_drafter(f"s2d:model={tmp_path / 'out'}", target)
    assert drafter.exits == (1,) and drafter.lm.num_layers == 1
    began = tiny.target_params()["layers"][0]
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), own["layers"][0], began)
    assert 0 < max(jax.tree.leaves(moved)) < 0.1


@pytest.mark.slow
def test_what_a_folder_must_say(tmp_path):
    lm, weights = tiny.TARGET, tiny.target_params()
    target = tiny.model(lm, weights)
    for exits in ([2], [1, 3], "1 2", [0, 2], []):
        models.save(tmp_path / "draft", lm, weights, fields={EXITS: exits})
        if exits == [2]:
            assert registry.build_drafter(f"s2d:model={tmp_path / 'draft'}", target)[0].exits == (2,)
            continue
        with pytest.raises(ValueError, match="s2d_exits is .* and must ascend to the model's 2 layers"):
            registry.build_drafter(f"s2d:model={tmp_path / 'draft'}", target)


@pytest.mark.slow
def test_one_draft_serves_two_targets(tmp_path):
    """A folder of two layers with exits, for targets of three layers and of two; each writes its own plain text."""
    deep, few = small.with_layers(small.TARGET, 3), small.TARGET
    models.save(tmp_path / "draft", *first(deep, small.weights(deep), 2), fields={EXITS: [1, 2]})
    said = []
    for lm in (deep, few):
        target = tiny.model(lm, small.weights(lm))
        drafter, draft = registry.build_drafter(f"s2d:model={tmp_path / 'draft'},thresholds=0.6,length=3", target)
        assert drafter.exits == (1, 2)
        decoder, model = specjax.speculative(lm, drafter), {"target": target.params, "draft": draft}
        state = decoding.run(decoder, model, small.begin(decoder, model, eos=small.eos_of(lm)))
        assert texts(state) == [text for text, _ in small.plain(lm)]
        assert state.stats.accepted[:, 1:].sum() > 0
        said.append(texts(state))
    assert said[0] != said[1]
