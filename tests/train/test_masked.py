"""Training of diffusion models: the losses' formulas, whose gradients reach what, and the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed

from specjax import cli, models
from specjax.decode import Diffusion
from specjax.lm import Block, Output, Wants
from specjax.models import LlamaLM, Masked, llama_config
from specjax.objectives.base import Batch
from specjax.objectives.masked import CertaintyForcing, ConfidenceAware, MaskedDiffusion, surprise

V, T, MASK = 9, 12, 8
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, T)))
ANSWER = jnp.asarray([[0] * 2 + [1] * 10, [0] * 4 + [1] * 6 + [0] * 2, [0] * 1 + [1] * 11], bool)
BATCH = Batch(TOKENS, ANSWER)


@dataclasses.dataclass(frozen=True)
class Table:
    """A model whose logits are its parameters `[B, T, V]`; it remembers what it was shown."""

    def __call__(self, params, block, cache, *, wants):
        Table.shown = block
        return Output(None, logits=params)


def table(seed=0):
    return 2 * jax.random.normal(jax.random.key(seed), (3, T, V))


def test_lladas_loss_with_everything_masked():
    objective = MaskedDiffusion(Table(), MASK, False, eps=1.0)
    loss, metrics = objective.loss(table(), None, BATCH, jax.random.key(0))
    each = surprise(table().at[:, :, MASK].set(-jnp.inf), TOKENS)
    np.testing.assert_allclose(loss, jnp.mean(each[ANSWER]), rtol=1e-5)
    np.testing.assert_array_equal(Table.shown.tokens == MASK, ANSWER)
    assert int(metrics["weight"]) == int(ANSWER.sum())
    # padding after the answer is not seen, the prompt is
    assert Table.shown.visible[1, 0].tolist() == [True] * 10 + [False] * 2


def test_lladas_loss_weighs_by_the_rate_that_was_drawn():
    """Over many draws its mean is the loss with everything masked, since this model does not look at its input."""
    objective = MaskedDiffusion(Table(), MASK, False, eps=0.05)
    losses = jax.vmap(lambda key: objective.loss(table(), None, BATCH, key)[0])(
        jax.random.split(jax.random.key(1), 4000)
    )
    want = jnp.mean(surprise(table().at[:, :, MASK].set(-jnp.inf), TOKENS)[ANSWER])
    assert abs(losses.mean() - want) < 4 * losses.std() / np.sqrt(len(losses))


def test_a_shifted_model_is_read_one_position_earlier():
    objective = MaskedDiffusion(Table(), MASK, True)
    got = objective.logits(table(), TOKENS, ANSWER)[:, 1:]
    np.testing.assert_array_equal(got[..., :MASK], table()[:, :-1, :MASK])
    assert bool(jnp.all(got[..., MASK] == -jnp.inf))


@pytest.mark.parametrize("block", (4, 0))
def test_a_block_is_learned_and_what_follows_is_open(block):
    objective = CertaintyForcing(Table(), MASK, False, block_length=block)
    for seed in range(8):
        inside, after = objective.parts(ANSWER, jax.random.uniform(jax.random.key(seed), (3,)))
        assert not bool((inside & after).any()) and not bool(((inside | after) & ~ANSWER).any())
        for row in range(3):
            at = np.flatnonzero(inside[row])
            assert 1 <= len(at) <= (block or T) and at[-1] - at[0] == len(at) - 1
            rest = np.flatnonzero(ANSWER[row] & ~inside[row])
            np.testing.assert_array_equal(np.flatnonzero(after[row]), rest[rest > at[-1]])


def test_certainty_is_forced_where_the_prediction_is_right_and_nowhere_else():
    """The card's check: the entropy term has no gradient at positions that are predicted wrongly."""
    key, params = jax.random.key(3), table()
    grads = [
        jax.grad(lambda p, w=weight: CertaintyForcing(Table(), MASK, False, 0, weight=w).loss(p, None, BATCH, key)[0])(
            params
        )
        for weight in (0.0, 3.0)
    ]
    right = ANSWER & (jnp.argmax(params.at[:, :, MASK].set(-jnp.inf), axis=-1) == TOKENS)
    changed = jnp.any(grads[0] != grads[1], axis=-1)
    assert bool(right.any()) and bool((ANSWER & ~right).any())
    np.testing.assert_array_equal(changed, right)


def test_certainty_forcing_is_its_formula():
    objective = CertaintyForcing(Table(), MASK, False, 0, weight=1.5, temperature=0.7)
    loss, metrics = objective.loss(table(), None, BATCH, jax.random.key(5))
    logits = np.asarray(table(), np.float64)[..., :MASK]
    dist = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(-1, keepdims=True)
    entropy = -(dist * np.log(dist)).sum(-1)
    right = np.asarray(ANSWER) & (logits.argmax(-1) == np.asarray(TOKENS))
    each = np.asarray(surprise(table()[..., :MASK], TOKENS))
    drawn = [jax.random.uniform(key, (T + 1,))[1:] for key in jax.random.split(jax.random.key(5), len(TOKENS))]
    first = np.asarray(ANSWER & (jnp.stack(drawn) < 0.5))
    want = each[first].mean() + each[np.asarray(ANSWER) & ~first].mean() + 1.5 * entropy[right].mean()
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy[right].mean(), rtol=1e-5)


def test_confidence_is_raised_where_the_prediction_is_right_and_nowhere_else():
    """CAP: LLaDA's loss plus the entropy of right masked predictions, whose gradient is 0 at wrong and at known positions."""
    key, params = jax.random.key(3), table()
    plain, weighted = (ConfidenceAware(Table(), MASK, False, eps=0.3, weight=weight) for weight in (0.0, 3.0))
    loss = lambda objective: lambda params: objective.loss(params, None, BATCH, key)
    (low, _), (high, metrics) = (loss(objective)(params) for objective in (plain, weighted))
    masked = np.asarray(Table.shown.tokens == MASK)
    logits = np.asarray(params, np.float64)[..., :MASK]
    right = masked & (logits.argmax(-1) == np.asarray(TOKENS))
    dist = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    entropy = -(dist * np.log(dist)).sum(-1)[right].mean()
    assert right.any() and (masked & ~right).any() and (np.asarray(ANSWER) & ~masked).any()
    assert low == MaskedDiffusion(Table(), MASK, False, eps=0.3).loss(params, None, BATCH, key)[0]
    np.testing.assert_allclose([metrics["entropy"], high - low], [entropy, 3 * entropy], rtol=1e-4)
    grads = [jax.grad(lambda p, own=own: loss(own)(p)[0])(params) for own in (plain, weighted)]
    np.testing.assert_array_equal(jnp.any(grads[0] != grads[1], axis=-1), right)
    assert not bool(jnp.any(grads[1][~jnp.asarray(masked)]))


def test_a_masked_block_sees_the_clean_text_before_it():
    """One pass of both texts gives what passes over each block after the clean text give, and padding joins none."""
    lm, size = LlamaLM(llama_config(V, 16, 24, 1, 2, 2, 8, max_position_embeddings=64)), 4
    params = jax.tree.map(lambda x: 3 * x, jax.jit(lm.init)(jax.random.key(0)))
    noisy = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, TOKENS.shape), MASK, TOKENS)
    real = jnp.arange(T)[None] < jnp.asarray([[12], [10], [12]])
    got = jax.jit(MaskedDiffusion(lm, MASK, False, block=size).logits)(params, noisy, real, BATCH)
    of, at = jnp.arange(T) // size, jnp.broadcast_to(jnp.arange(T), TOKENS.shape)
    sees = (of[None] <= of[:, None])[None] & real[:, None]
    read = jax.jit(
        lambda ids: lm(params, Block(ids, at, at[:, 0], sees, causal=False), None, wants=Wants(logits=True)).logits
    )
    want = jnp.stack([read(jnp.where(of[None] < block, TOKENS, noisy)) for block in range(3)])
    want = jnp.where(jnp.arange(V) == MASK, -jnp.inf, jnp.take_along_axis(want, of[None, None, :, None], axis=0)[0])
    np.testing.assert_allclose(jnp.where(real[..., None], got, 0), jnp.where(real[..., None], want, 0), atol=1e-5)


def test_a_negative_weight():
    with pytest.raises(ValueError, match="cap needs a weight of at least 0, got -1"):
        ConfidenceAware(Table(), MASK, False, weight=-1)


@pytest.mark.parametrize("fields", ({"share": 1.0}, {"temperature": 0.0}, {"weight": -1.0}, {"block_length": -1}))
def test_fields_out_of_range(fields):
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"dparallel needs .* got .*{name}={value}") as error:
        CertaintyForcing(Table(), MASK, False, **fields)
    assert "Table" not in str(error.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A diffusion model, one that is none, and data that repeats itself."""
    folder = tmp_path_factory.mktemp("files")
    lm = LlamaLM(llama_config(V, 16, 24, 1, 2, 2, 8, max_position_embeddings=64))
    models.save(folder / "masked", lm, jax.jit(lm.init)(jax.random.key(0)), diffusion=Masked(MASK, False))
    own = LlamaLM(changed(lm.config, qk_norm=True))
    models.save(folder / "blocks", own, jax.jit(own.init)(jax.random.key(0)), diffusion=Masked(MASK, False, 4))
    biased = LlamaLM(changed(lm.config, qkv_bias=True))
    models.save(folder / "shifted", biased, jax.jit(biased.init)(jax.random.key(0)), diffusion=Masked(MASK, True, 4))
    models.save(folder / "plain", lm, jax.jit(lm.init)(jax.random.key(0)))
    lines = [{"prompt": [1, 2], "tokens": [3, 4, 5, 6, 3, 4, 5, 6]}] * 16
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("diffusion", "masked"),
        ("dparallel:block_length=4", "masked"),
        ("cap:weight=0.1", "masked"),
        ("cap:weight=0.1", "blocks"),
    ),
)
def test_training_makes_a_model_that_is_read_back(files, tmp_path, capsys, name, kind):
    words = ["train", name, "--target", files / kind, "--data", files / "data.jsonl", "--output", tmp_path / "out"]
    options = ["--steps", 200, "--batch-size", 4, "--length", 10, "--learning-rate", 0.02, "--checkpoint-every", 200]
    assert cli.main([str(word) for word in [*words, *options]]) == 0
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()
    ]
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])
    from specjax.serve.engine import Engine

    engine = Engine(str(tmp_path / "out"), decode=Diffusion(unmask="fixed", block_length=4))
    (record,) = engine.run([engine.request([1, 2], max_new_tokens=8)])
    assert engine.model.masked == Masked(MASK, False, 4 * (kind == "blocks")) and record.tokens == [
        3,
        4,
        5,
        6,
        3,
        4,
        5,
        6,
    ]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "target", "more", "said"),
    (
        ("diffusion", "plain", [], "diffusion trains a diffusion model, and plain is an autoregressive one"),
        (
            "dparallel",
            "blocks",
            [],
            "dparallel trains models that see the whole canvas, and blocks does not",
        ),
        (
            "cap",
            "shifted",
            [],
            "cap trains models with blocks that have no shift and no window, and shifted has",
        ),
        ("medusa", "masked", [], "medusa is a head for an autoregressive model"),
        ("distill", "masked", ["--draft", "tiny-draft"], "distill teaches a draft of an autoregressive model"),
        ("dparallel", "masked", ["--loss", "jsd"], "--loss is not for dparallel"),
        ("diffusion", "masked", ["--weights", "int8"], "diffusion trains masked's own weights, and they are int8"),
    ),
)
def test_targets_of_the_other_kind(files, tmp_path, capsys, name, target, more, said):
    words = ["train", name, "--target", files / target, "--data", files / "data.jsonl", "--output", tmp_path / "out"]
    assert cli.main([str(word) for word in [*words, "--steps", 1, "--length", 10, *more]]) == 2
    assert said in capsys.readouterr().err
