"""Distillation of a small model: what the loss is made of, texts that the draft writes itself, and that it helps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny

import specjax
from specjax.draft import ModelDrafter
from specjax.expand import Chain
from specjax.lm import Wants
from specjax.models import TabularLM
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import LK, TVD, ForwardKL, acceptance
from specjax.objectives.means import MEAN
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays
from specjax.train.data import Rows, batches
from specjax.train.distill import Distill, continuations
from specjax.train.loop import Run, Settings, fit
from specjax.train.select import select

KEY = jax.random.key(5)
write = jax.jit(continuations, static_argnums=0, static_argnames=("prompt", "eos_ids"))
loss_of = jax.jit(lambda objective, *args: objective.loss(*args), static_argnums=0)
ENDS = (1, 2)


def batch(rows=slice(0, 6)) -> Batch:
    source = tiny.rows()
    return Batch(jnp.asarray(source.tokens[rows]), jnp.asarray(source.mask[rows]))


@functools.partial(jax.jit, static_argnums=0)
def logits(lm, params, given, temperature=1.0):
    return read(lm, params, given, Wants(logits=True)).logits[:, :-1] / temperature


@pytest.mark.parametrize(("divergence", "temperature"), [(ForwardKL(), 1.0), (TVD(), 0.5), (LK("lambda"), 2.0)])
def test_the_loss_is_the_divergence_of_both_distributions(divergence, temperature):
    objective = Distill(tiny.TARGET, tiny.DRAFT, divergence, temperature)
    given = batch()
    value, metrics = loss_of(objective, tiny.draft_params(), tiny.target_params(), given, KEY)
    target = logits(tiny.TARGET, tiny.target_params(), given, temperature)
    draft = logits(tiny.DRAFT, tiny.draft_params(), given, temperature)
    mask = given.mask[:, 1:]
    np.testing.assert_allclose(value, divergence(target, draft, mask), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance"], MEAN(acceptance(target, draft), mask), rtol=1e-5)
    assert metrics["weight"] == mask.sum()


def test_captured_likeliest_tokens_beside_features_change_nothing():
    objective, given = Distill(tiny.TARGET, tiny.DRAFT), batch()
    output = read(tiny.TARGET, tiny.target_params(), given, Wants(final=True, topk=2))
    told = dataclasses.replace(given, output=output)
    value = lambda of: float(loss_of(objective, tiny.draft_params(), tiny.target_params(), of, KEY)[0])
    np.testing.assert_allclose(value(told), value(given), rtol=1e-5)


def test_what_is_not_to_be_predicted_counts_nothing():
    """Other padding must not show, another prompt must."""
    objective = Distill(tiny.TARGET, tiny.DRAFT)
    given = batch()
    value = lambda tokens: float(
        loss_of(objective, tiny.draft_params(), tiny.target_params(), dataclasses.replace(given, tokens=tokens), KEY)[0]
    )
    slots = np.arange(16)[None]
    end = 16 - np.argmax(np.asarray(given.mask)[:, ::-1], axis=1)[:, None]
    padded = jnp.where(slots < end, given.tokens, 7)
    np.testing.assert_allclose(value(padded), value(given.tokens), rtol=1e-6)
    start = np.argmax(np.asarray(given.mask), axis=1)[:, None]
    prompt = jnp.where(slots < start, (given.tokens + 1) % 32, given.tokens)
    assert (np.asarray(prompt) != np.asarray(given.tokens)).any() and value(prompt) != value(given.tokens)


def test_a_draft_that_is_its_teacher_has_nothing_to_learn():
    objective = Distill(tiny.TARGET, tiny.TARGET)
    value, metrics = loss_of(objective, tiny.target_params(), tiny.target_params(), batch(), KEY)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose([metrics["acceptance"], metrics["agreement"]], 1, rtol=1e-6)


def test_selected_tokens_alone_are_trained_on():
    objective = Distill(tiny.TARGET, tiny.DRAFT, keep=0.4)
    reference = jax.tree.map(lambda leaf: leaf[::-1], tiny.draft_params())
    given = batch()
    value, metrics = loss_of(objective, tiny.draft_params(), (tiny.target_params(), reference), given, KEY)
    target, draft, other = (
        logits(lm, params, given)
        for lm, params in (
            (tiny.TARGET, tiny.target_params()), (tiny.DRAFT, tiny.draft_params()), (tiny.DRAFT, reference),
        )
    )  # fmt: skip
    mask = given.mask[:, 1:]
    kept = select(target, draft, other, mask, 0.4)
    np.testing.assert_allclose(value, ForwardKL()(target, draft, kept), rtol=1e-5)
    assert metrics["weight"] == kept.sum() < mask.sum()


def test_continuations_go_on_from_the_prompts_up_to_an_eos():
    given = batch(slice(0, 24))
    given = dataclasses.replace(given, mask=given.mask.at[3].set(False))
    written = write(tiny.DRAFT, tiny.draft_params(), given, KEY, prompt=3, eos_ids=ENDS)
    first = np.argmax(np.asarray(given.mask), axis=1)
    end = 16 - np.argmax(np.asarray(given.mask)[:, ::-1], axis=1)
    start = np.maximum(first, np.minimum(3, end - 1))
    assert len(set(start.tolist())) > 1
    tokens, mask = np.asarray(written.tokens), np.asarray(written.mask)
    assert not mask[3].any()
    lasts = []
    for row in set(range(24)) - {3}:
        at = mask[row].nonzero()[0]
        assert at.tolist() == list(range(start[row], at[-1] + 1))
        assert np.array_equal(tokens[row, : start[row]], np.asarray(given.tokens)[row, : start[row]])
        assert not np.isin(tokens[row, at[:-1]], ENDS).any() and not tokens[row, at[-1] + 1 :].any()
        assert at[-1] == 15 or tokens[row, at[-1]] in ENDS
        lasts.append(at[-1])
    assert min(lasts) < 15 == max(lasts)
    other = write(tiny.DRAFT, tiny.draft_params(), given, jax.random.key(6), prompt=3, eos_ids=ENDS)
    assert not np.array_equal(tokens, other.tokens)


def test_continuations_are_samples_at_temperature_one():
    """The first written token of many equal rows has the model's distribution."""
    given = Batch(jnp.full((24, 16), 3, jnp.int32), jnp.ones((24, 16), bool))
    keys = jax.random.split(KEY, 100)
    written = [write(tiny.DRAFT, tiny.draft_params(), given, key, prompt=3, eos_ids=ENDS).tokens[:, 3] for key in keys]
    dist = np.asarray(jax.nn.softmax(logits(tiny.DRAFT, tiny.draft_params(), given)[0, 2]))
    count = 24 * len(keys)
    seen = np.bincount(np.concatenate(written), minlength=32) / count
    assert np.max(np.abs(seen - dist) / np.sqrt(dist * (1 - dist) / count)) < 4.5
    assert 0.5 * np.abs(dist - 1 / 32).sum() > 0.1  # far enough from uniform for the test to see something


@pytest.mark.slow
def test_rows_are_the_datas_or_the_drafts_own_by_a_coin_and_samples_carry_no_gradient():
    given = batch(slice(0, 24))
    from_files = dataclasses.replace(given, documents=jnp.zeros_like(given.tokens))
    target, draft = tiny.target_params(), tiny.draft_params()

    @functools.partial(jax.jit, static_argnums=0)
    def grad(objective, given, key):
        return jax.value_and_grad(lambda params: objective.loss(params, target, given, key)[0])(draft)

    plain, mixed = (
        Distill(tiny.TARGET, tiny.DRAFT),
        Distill(tiny.TARGET, tiny.DRAFT, on_policy=0.5, prompt=3, eos_ids=ENDS),
    )
    for seed in range(3):
        key = jax.random.key(seed)
        noise = jax.random.split(key, 24)
        own = np.asarray([jax.random.uniform(jax.random.fold_in(key, 1)) < 0.5 for key in noise])
        assert 4 < own.sum() < 20
        written = write(tiny.DRAFT, draft, given, noise, prompt=3, eos_ids=ENDS)
        text = jax.tree.map(lambda new, old, own=own: jnp.where(own[:, None], new, old), written, given)
        (value, got), (wanted, expected) = grad(mixed, from_files, key), grad(plain, text, key)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"on_policy": 1.5}, "on_policy must lie in"),
        ({"keep": 0.0}, "keep must lie in"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"prompt": 0}, "prompt must be at least 1"),
    ],
)
def test_fields_out_of_range(fields, said):
    with pytest.raises(ValueError, match=said):
        Distill(tiny.TARGET, tiny.DRAFT, **fields)


MARKOV = TabularLM(32)
TABLE = MARKOV.init(jax.random.key(4), concentration=0.1)


def speed(params, prompts) -> float:
    """Tokens a step of greedy decoding of the Markov chain with this draft."""
    decoder = specjax.speculative(MARKOV, ModelDrafter(tiny.DRAFT, Chain(3)))
    models = {"target": TABLE, "draft": params}
    count, length = prompts.shape
    lengths = jnp.full((count,), length, jnp.int32)
    prompts = Prompts(prompts, lengths, jax.random.split(KEY, count), lengths + 12, SamplingArrays.make(count))
    make = jax.jit(lambda models: decoder.init(models, prompts, capacity=24))
    state = specjax.run(decoder, models, make(models))
    return float((state.length - state.prompt_length).sum() / state.stats.steps.sum())


@pytest.mark.slow
def test_a_distilled_draft_accepts_more_on_heldout_prompts(tmp_path):
    rng = np.random.default_rng(0)
    texts, whole = rng.integers(0, 32, (96, 16)).astype(np.int32), jnp.ones((96, 16), bool)
    dists = np.exp(MARKOV.next_log_probs(TABLE, np.arange(32)[:, None]))
    for at in range(1, 16):
        texts[:, at] = [rng.choice(32, p=dists[token]) for token in texts[:, at - 1]]
    train, heldout = Rows(texts[:80], np.asarray(whole[:80])), Batch(jnp.asarray(texts[80:]), whole[80:])
    objective = Distill(MARKOV, tiny.DRAFT)
    losses = []
    with Run(tmp_path, {}) as run:
        params = fit(
            objective, tiny.draft_params(), TABLE, batches(train, 16, 0),
            Settings(steps=60, learning_rate=2e-2, warmup=5), run,
            on_step=lambda record: losses.append(record["loss"]),
        )  # fmt: skip
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    measure = jax.jit(lambda params: objective.loss(params, TABLE, heldout, KEY)[1])
    before, after = measure(tiny.draft_params()), measure(params)
    assert after["acceptance"] > before["acceptance"] + 0.3
    assert after["agreement"] > before["agreement"] + 0.3
    prompts = heldout.tokens[:, :8]
    assert speed(params, prompts) > speed(tiny.draft_params(), prompts) + 0.5
