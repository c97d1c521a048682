"""Online learning of a draft model of other tokens: its loss beside a loop, and texts that stay while it gets better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.other_tokens import words
from support.shapes import changed
from support.two_tokenizers import pair

from specjax import decoder as decoding
from specjax.assembly.other_vocabulary import shared
from specjax.draft import OmniDraft
from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.tables import tables
from specjax.expand import Chain
from specjax.lm import Wants
from specjax.models.llama import LlamaLM
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import ReverseKL
from specjax.serve import online
from specjax.serve.engine import Engine
from specjax.serve.online import OnlineEngine
from specjax.serve.students import student_of

PROMPTS = ("the cat", "abcdxy", "hi the")


def toy(target, draft, longest=4):
    """A model of each of two vocabularies, the student that drafts for the first one, parameters and tables."""
    made = tables(target, draft)
    lm = LlamaLM(changed(tiny.DRAFT.config, vocab_size=len(target.texts)))
    own = LlamaLM(changed(tiny.DRAFT.config, vocab_size=len(draft.texts)))
    weights = [jax.tree.map(lambda x: 2 * x, one.init(jax.random.key(seed))) for one, seed in ((lm, 1), (own, 2))]
    student = student_of(OmniDraft(SharedLM.of(own, made), longest=longest))
    return lm, student, weights, {name: jnp.asarray(array) for name, array in made.arrays.items()}


def loss_of(lm, student, weights, arrays, tokens, missed):
    texts = {"tokens": jnp.asarray(tokens), "missed": jnp.asarray(missed)}
    return student.loss(lm, weights[1], arrays, weights[0], texts)


def log_probs(lm, params, tokens):
    tokens = jnp.asarray([tokens])
    return np.asarray(jax.nn.log_softmax(read(lm, params, Batch(tokens, tokens > 0), Wants(logits=True)).logits[0]))


@pytest.mark.parametrize("longest", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_loss_is_that_of_a_loop_over_tokens(longest):
    """A reverse KL over the tokens that both have, where the target's likeliest is one, and what n-grams lack."""
    target, student, weights, arrays = toy(*words(10), longest)
    text = [3, 7, 0, 9, 6, 2, 7, 8]
    missed = [True, True, False, True, True, True, False, True]
    arrays["counts"] = arrays["counts"].at[9].set(3)  # an n-gram too long for one of the two
    arrays["spelling"] = jnp.pad(arrays["spelling"], ((0, 0), (0, 1)))
    taught = log_probs(target, weights[0], text)
    ids, columns = np.asarray(arrays["ids"]), np.asarray(arrays["columns"])
    spelt = [np.asarray(arrays["spelling"][t, : int(arrays["counts"][t])]).tolist() for t in text]
    chance = log_probs(student.drafter.lm.lm, weights[1], sum(spelt, []))
    normal = lambda scores: scores - np.log(np.exp(scores).sum())
    divergences, spellings, at = [], [], 0
    for i, (token, tokens) in enumerate(zip(text, spelt, strict=True)):
        if missed[i] and i and token in ids:
            p, q = normal(taught[i - 1, ids]), normal(chance[at - 1, columns])
            known = taught[i - 1].argmax() in ids
            divergences += [np.sum(np.exp(q) * (q - p))] * known
        elif missed[i] and i and len(tokens) <= longest:
            spellings += [-chance[at - 1 + j, one] for j, one in enumerate(tokens)]
        at += len(tokens)
    assert divergences and len(spellings) == {2: 2, 3: 5}[longest]
    found = loss_of(target, student, weights, arrays, [text], [missed])
    assert float(found) == pytest.approx(np.mean(divergences) + 0.2 * np.mean(spellings), rel=1e-4)


@pytest.mark.slow
def test_of_the_same_tokens_it_is_the_reverse_kl():
    target, student, weights, arrays = toy(words(10)[0], words(10)[0])
    tokens = jnp.asarray([[3, 7, 0, 9, 6], [1, 2, 3, 4, 5]])
    missed = jnp.asarray([[True, False, True, True, False], [False, True, True, False, True]])
    found = loss_of(target, student, weights, arrays, tokens, missed)
    taught, ours = (
        read(one, params, Batch(tokens, missed), Wants(logits=True)).logits[:, :-1]
        for one, params in zip((target, student.drafter.lm.lm), weights, strict=True)
    )
    np.testing.assert_allclose(found, ReverseKL()(taught, ours, missed[:, 1:]), rtol=1e-5)


def begun(target, draft, **options):
    options = {"interval": 3, "learning_rate": 2e-2, "length": 32} | options
    lm, params = shared(draft, target)
    return OnlineEngine(target, (OmniDraft(lm, Chain(3)), params), **options)


def served(engine, temperature):
    asked = [engine.request(prompt, max_new_tokens=16, temperature=temperature) for prompt in PROMPTS]
    return list(engine.run(asked, batch_size=2, capacity=64))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_stays_while_the_draft_gets_better(tmp_path, temperature):
    """Nothing is compiled again, and another engine goes on with what was learnt."""
    target, draft = pair()
    plain = [record.tokens for record in served(Engine(target, drafter="none"), temperature)]
    engine, steps = begun(target, draft), []
    for turn in range(6):
        records = served(engine, temperature)
        assert [record.tokens for record in records] == plain
        steps.append(sum(record.steps for record in records))
        if turn == 1:
            programs = decoding.run_program._cache_size(), online.update._cache_size()
    assert (decoding.run_program._cache_size(), online.update._cache_size()) == programs
    assert steps[-1] < steps[0] and engine.losses[-1] < engine.losses[0] and len(engine.losses) == 6
    jax.tree.map(np.testing.assert_array_equal, engine.params["draft"]["lm"], engine.draft_params)
    engine.save(tmp_path / "learnt")
    other = begun(target, draft)
    other.resume(tmp_path / "learnt")
    for one in (engine, other):
        served(one, temperature)
    jax.tree.map(np.testing.assert_array_equal, other._learnt(), engine._learnt())
