"""PAT: the mask's schedule and losses, a narrow model that says what the masked one does, and the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.conformance import but_slow
from support.objectives import packed
from support.shapes import changed

import specjax
from specjax import cli, models
from specjax.assembly import registry
from specjax.lm import Wants
from specjax.models import LlamaLM
from specjax.models.layer import LayerConfig
from specjax.models.norms import NormConfig
from specjax.objectives.base import read
from specjax.objectives.next_token import NextToken
from specjax.objectives.pat import Pat, _through, of_mask, of_module

SIZE = tiny.TARGET.config.hidden_size
SMALL = Pat(tiny.TARGET, width=SIZE // 2, rank=5, lora_rank=2, lora_alpha=1.0, updates=10_000)


def at_random(objective=SMALL, weights=None):
    """Parameters in mid-training: a mask, modules and changes that are not their first ones."""
    made = objective.init(jax.random.key(0), tiny.target_params() if weights is None else weights)
    leaves, tree = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (1, (1.12236, 0.9999, 0.87744)),
        (1000, (1.28080, 0.9, 0.51920)),
        (5000, (0.99870, 0.5, 0.00130)),
        (8000, (1.0, 0.5, 0.00005)),
        (9999, (1.0, 0.5, 0.00005)),
    ],
)
def test_channels_are_switched_as_published(step, wanted):
    mask = jnp.asarray([0.5, 0.0, -0.5])
    np.testing.assert_allclose(SMALL.switch(mask, jnp.float32(step / 10_000)), wanted, atol=2e-5)
    slope = jax.grad(lambda mask: SMALL.switch(mask, jnp.float32(step / 10_000)).sum())(mask)
    assert (np.asarray(slope) == 0).all() == (step >= 8000)  # it stays as it is


def test_at_first_nothing_is_changed_and_at_the_end_a_channel_is_kept_or_not():
    np.testing.assert_allclose(SMALL.switch(jnp.zeros(3), jnp.float32(0)), 1.0)
    few = dataclasses.replace(SMALL, width=2)
    np.testing.assert_array_equal(few.switch(jnp.asarray([1e-4, 0.0, -1e-4, 0.3]), None), [1, 0, 0, 1])
    np.testing.assert_array_equal(
        few.switch(jnp.asarray([-0.1, -0.3, -0.1, -0.1]), None), [1, 0, 1, 0]
    )  # none is above 0


def test_a_mask_can_come_as_far_as_in_the_authors_run():
    assert SMALL.rates == {}
    own = dataclasses.replace(SMALL, learning_rate=5e-5)
    assert own.rates == {"mask": pytest.approx(1.0)}
    short = dataclasses.replace(SMALL, updates=200, learning_rate=1e-3, reach=2.0)
    assert short.rates == {"mask": pytest.approx(10.0)}


def test_the_losses_are_those_of_the_definition():
    mask = np.asarray([0.7, -0.2, 0.0, 0.4, -0.9, 0.1])
    want = 10 * abs(4 - 3) / 3 + np.mean([0.04, 0.01, 0.16]) + np.mean([0.09, 0.25, 0.16])
    assert float(of_mask(jnp.asarray(mask), 3)) == pytest.approx(want, rel=1e-5)
    slope = jax.grad(of_mask)(jnp.asarray(mask), 3)
    np.testing.assert_allclose(slope[0], 10 / 3 + 2 * 0.2 / 3, rtol=1e-5)  # straight through the count
    assert float(of_mask(jnp.zeros(4), 3)) == pytest.approx(10 / 3 + 0.25)  # no channel is above 0
    into = np.asarray([[1.0, 2.0], [0.0, 3.0]])
    assert float(of_module(jnp.asarray(into))) == pytest.approx(((into @ into.T - np.eye(2)) ** 2).mean())


def test_a_module_is_what_it_says_on_rows():
    rng = np.random.default_rng(0)
    into, out_of, scale, switch, x = (rng.normal(size=shape) for shape in ((2, 4), (4, 2), 4, 4, (3, 4)))
    module = {"into": jnp.float32(into), "out_of": jnp.float32(out_of), "scale": jnp.float32(scale)}
    want = scale * switch * (x + x @ into.T @ out_of.T)
    np.testing.assert_allclose(_through(module, jnp.float32(x), jnp.float32(switch)), want, rtol=1e-5, atol=1e-5)


def logits_of(lm, params):
    return jax.jit(lambda params: read(lm, params, packed(), Wants(logits=True)).logits)(params)


@pytest.mark.parametrize("tied", but_slow((True, False), False))
def test_the_narrow_model_says_what_the_masked_one_does(tied):
    """A model with biases and head norms: logits agree up to rounding, of a model with half of the channels."""
    config = changed(tiny.TARGET.config, qkv_bias=True, tie_word_embeddings=tied, qk_norm=True)
    config = config.every(NormConfig, eps=0.1)  # so large that its share of a mean square tells
    lm = LlamaLM(config)
    weights = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), lm.init(jax.random.key(3))
    )
    objective = dataclasses.replace(SMALL, lm=lm)
    params = at_random(objective, weights)
    kept = SIZE // 2
    assert int((params["mask"] > 0).sum()) != kept  # the count is not right yet
    wide = logits_of(objective.open, objective.masked(params, weights, objective.switch(params["mask"], None)))
    narrow_lm, narrow = objective.cut(jax.tree.map(np.asarray, params), weights)
    assert narrow_lm.config.hidden_size == kept and narrow["embed"]["embedding"].shape == (lm.vocab_size, kept)
    assert jax.tree.map(jnp.shape, narrow) == jax.tree.map(jnp.shape, narrow_lm.abstract())
    np.testing.assert_allclose(logits_of(narrow_lm, narrow), wide, rtol=1e-4, atol=1e-4)
    without = {**params, "modules": jax.tree.map(lambda x: jnp.ones_like(x) if x.ndim == 1 else x, params["modules"])}
    other = objective.cut(jax.tree.map(np.asarray, without), weights)[1]
    assert np.abs(np.asarray(logits_of(narrow_lm, other)) - wide).max() > 0.01  # as with the released script


@pytest.mark.slow
def test_untrained_it_is_the_model_itself():
    weights = tiny.target_params()
    made = SMALL.init(jax.random.key(0), weights)
    own = SMALL.masked(made, weights, SMALL.switch(made["mask"], jnp.float32(0)))
    np.testing.assert_allclose(logits_of(SMALL.open, own), logits_of(tiny.TARGET, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_texts_and_in_training_the_masks():
    weights, params = tiny.target_params(), at_random()
    batch = packed()
    run = jax.jit(lambda params, batch: SMALL.loss(params, weights, batch, None))
    held_out, told = run(params, batch)
    own = SMALL.masked(params, weights, SMALL.switch(params["mask"], None))
    assert float(held_out) == pytest.approx(float(NextToken(SMALL.open).loss(own, None, batch, None)[0]), rel=1e-5)
    assert float(told["kept"]) == float((params["mask"] > 0).sum())
    done = dataclasses.replace(batch, done=jnp.full(len(batch.tokens), 0.3, jnp.float32))
    own = SMALL.masked(params, weights, SMALL.switch(params["mask"], jnp.float32(0.3)))
    modules = [
        params["modules"]["embed"],
        *(one for layer in params["modules"]["layers"].values() for one in layer.values()),
    ]
    more = of_mask(params["mask"], SIZE // 2) + sum(of_module(one["into"]) for one in modules)
    want = float(NextToken(SMALL.open).loss(own, None, batch, None)[0]) + float(more)
    assert float(run(params, done)[0]) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_the_command_cuts_a_draft_of_the_same_vocabulary(tmp_path, capsys):
    """Two updates, after which no mask is above 0: the folder is a model all the same, and texts do not change."""
    run = tiny.training(tmp_path)
    for words, said in (
        (("pat:width=99999",), "width must be from 1 to"),
        (("pat:rank=0",), "rank must be above 0"),
        (("pat:rank=99999",), "rank 99999 is more than the model's"),
        (("pat:reach=nan",), "reach must be above 0"),
        (("pat:updates=3",), "updates"),
        (("pat", "--loss", "tvd"), "--loss is not for pat"),
        (("pat", "--draft", "tiny-draft"), "--draft is not for pat"),
        (("pat", "--weights", "int8"), "leave out --weights"),
    ):
        assert run(*words) == 2
        assert said in capsys.readouterr().err
    assert run(f"pat:rank=4,width={SIZE // 2}") == 0
    assert f"{SIZE // 2} of {SIZE} channels are kept; 0 have a mask above 0" in capsys.readouterr().err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == SIZE // 2 and config["head_dim"] == tiny.TARGET.config.attentions[0].head_dim
    target = models.load(tmp_path / "target")
    assert registry.build_drafter(f"draft:model={tmp_path / 'out'}", target)[0].lm.config.hidden_size == SIZE // 2
    prompts = [{"prompt": [3, 9, 4], "temperature": 0.0}, {"prompt": [7, 7, 2, 11, 5], "temperature": 1.0}]
    write = lambda line: [
        one.tokens for one in specjax.generate(target, prompts, decode=line, max_new_tokens=12, seed=1)
    ]
    assert write(f"draft:model={tmp_path / 'out'}") == write("none")
    words = (
        "train",
        "pat",
        "--target",
        "tiny-diffusion",
        "--data",
        tmp_path / "data.jsonl",
        "--output",
        tmp_path / "no",
    )
    assert cli.main([str(word) for word in words]) == 2
    assert "is a diffusion model" in capsys.readouterr().err


def test_models_of_other_parts_are_refused():
    config = tiny.TARGET.config
    for other in (
        config.every(LayerConfig, post_norms=True),
        config.every(NormConfig, mean=True, kind="wide"),
        dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, scale=2.0)),
    ):
        with pytest.raises(ValueError, match="pat cuts models like Llama and Qwen"):
            Pat(LlamaLM(other))
