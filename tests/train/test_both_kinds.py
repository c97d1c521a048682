"""Training of a model of both kinds: the joint loss against plain passes, and the command, whose model drafts by itself."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.objectives import alone

import specjax
from specjax import cli, models
from specjax.assembly import registry
from specjax.draft.self_diffusion.objective import TrainSelfDiffusion
from specjax.lm import Block, Wants
from specjax.models import Masked

MASK, BLOCK, KEY = 31, 4, jax.random.key(5)


def passed(tokens, known):
    """Log-probabilities `[T, V]` of one pass over a text whose tokens see those before, and from `known` on all."""
    size = len(tokens)
    visible = np.tril(np.ones((size, size), bool))
    visible[known:, known:] = True
    block = Block(
        jnp.asarray(tokens)[None], jnp.arange(size)[None], jnp.zeros(1, jnp.int32), jnp.asarray(visible)[None]
    )
    logits = tiny.DRAFT(tiny.draft_params(), block, None, wants=Wants(logits=True)).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_loss_is_that_of_a_pass_for_each_block_and_one_for_the_text(weight):
    objective, batch = TrainSelfDiffusion(tiny.DRAFT, MASK, BLOCK, weight=weight), alone()
    value, metrics = jax.jit(objective.loss)(tiny.draft_params(), None, batch, KEY)
    total, masks, dues = 0.0, 0, 0
    for row, key in enumerate(jax.random.split(KEY, 4)):
        drawn = np.asarray(jax.random.uniform(key, (batch.tokens.shape[1] + 1,)))
        rate = 1e-3 + (1 - 1e-3) * drawn[0]
        size = int(np.flatnonzero(batch.mask[row])[-1]) + 1
        text, learned = batch.tokens[row, :size], batch.mask[row, :size]
        masked = learned & (drawn[1 : size + 1] < rate) & (text != MASK)  # which no distribution of masks has
        noisy = np.where(masked, MASK, text)
        for low in range(0, size, BLOCK):
            logits = passed([*text[:low], *noisy[low : low + BLOCK]], low)
            said = jax.nn.log_softmax(logits.at[:, MASK].set(-jnp.inf))
            for at in low + np.flatnonzero(masked[low : low + BLOCK]):
                total, masks = total - float(said[at, text[at]]) / rate, masks + 1
        said = jax.nn.log_softmax(passed(text, size))
        for at in np.flatnonzero(learned[1:]):
            total, dues = total - weight * float(said[at, text[at + 1]]), dues + 1
    assert masks > 4 and float(value) == pytest.approx(total / (masks + weight * dues), rel=1e-4)
    assert float(metrics["weight"]) == pytest.approx(masks + weight * dues)


def test_fields():
    for fields in ({"block": 0}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="self_diffusion needs block >= 1 and eps in"):
            TrainSelfDiffusion(tiny.DRAFT, MASK, **fields)
    with pytest.raises(ValueError, match="self_diffusion: weight must not be negative, got -1"):
        TrainSelfDiffusion(tiny.DRAFT, MASK, weight=-1)


@pytest.mark.slow
def test_the_command_makes_a_model_of_both_kinds(tmp_path, capsys):
    run = tiny.training(tmp_path)
    for words, said in (
        (
            ("self_diffusion",),
            "target has no spare token for masks: name one that no text has, as self_diffusion:mask=7",
        ),
        (("self_diffusion:mask=33",), "self_diffusion: mask 33 is outside the 32 tokens of 'target'"),
        (("self_diffusion:mask=31,block=0",), "self_diffusion needs block >= 1"),
        (("self_diffusion:mask=31", "--loss", "tvd"), "--loss is not for self_diffusion"),
    ):
        assert run(*words) == 2 and said in capsys.readouterr().err
    assert run("self_diffusion:mask=31,block=8") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["self_diffusion_mask"], config["self_diffusion_block"]) == (31, 8)
    trained = models.load(tmp_path / "out", dtype="float32")
    assert trained.dual == Masked(31, shift=False, block=8, align="prompt_end", causal_context=True)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), trained.params, tiny.target_params())
    assert 0 < max(jax.tree.leaves(moved)) < 0.1
    assert registry.build_drafter("self_diffusion:length=3", trained)[0].mask_id == 31
    ask = {"max_new_tokens": 6, "sampling": specjax.Sampling(ignore_eos=True)}
    (plain,) = specjax.generate(trained, [[3, 1, 4]], decode="plain", **ask)
    (drafted,) = specjax.generate(trained, [[3, 1, 4]], decode="self_diffusion:length=3", **ask)
    assert drafted.tokens == plain.tokens
    again = ["train", "lm", "--target", str(tmp_path / "out"), "--data", str(tmp_path / "data.jsonl"), "--steps", "1"]
    assert cli.main([*again, "--batch-size", "2", "--length", "12", "--output", str(tmp_path / "again")]) == 0
    assert models.load(tmp_path / "again", dtype="float32").dual == trained.dual
