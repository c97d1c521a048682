"""Online learning of a draft model of other tokens: its loss beside a loop, and texts that stay while it gets better."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.other_tokens import words
from support.shapes import changed
from support.two_tokenizers import pair

import specjax
from specjax import decoder as decoding
from specjax.assembly.other_vocabulary import shared
from specjax.draft import Acceptance, OmniDraft
from specjax.draft.acceptance import accept_log_prob
from specjax.draft.adaptive import adaptive
from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.tables import tables
from specjax.expand import Chain
from specjax.lm import Wants
from specjax.models.llama import LlamaLM
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import ReverseKL
from specjax.prompts import Prompts
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss_of(lm, student, weights, arrays, tokens, missed):
    texts = {"tokens": jnp.asarray(tokens), "missed": jnp.asarray(missed)}
    return student.loss(lm, weights[1], arrays, weights[0], texts)


@functools.partial(jax.jit, static_argnums=0)
def reads(lm, params, tokens):
    """Log-probabilities and features of one text, which may be padded."""
    output = read(lm, params, Batch(tokens[None], tokens[None] >= 0), Wants(logits=True, final=True))
    return jax.nn.log_softmax(output.logits[0]), output.final[0]


def read_text(lm, params, tokens):
    padded = jnp.zeros(20, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens))
    return [np.asarray(array)[: len(tokens)] for array in reads(lm, params, padded)]


def log_probs(lm, params, tokens):
    return read_text(lm, params, tokens)[0]


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
    found = loss_of(target, student, weights, arrays, np.asarray([text]), np.asarray([missed]))
    assert float(found) == pytest.approx(np.mean(divergences) + 0.2 * np.mean(spellings), rel=1e-4)


HEAD = Acceptance(layers=1)


def ruled(drafter, key=3):
    """With a head of random numbers, which ends its drafts."""
    rule = HEAD.bind(drafter.lm)
    made = lambda params: rule.init_params(jax.random.key(key), params)
    return adaptive(drafter, rule, 3), made


def test_the_head_learns_how_likely_judged_tokens_are_kept():
    """Beside a loop that writes each drafted token after the text before it; the draft model's gradient is as without."""
    target, student, weights, arrays = toy(*words(10))
    drafter, made = ruled(OmniDraft(student.drafter.lm))
    own = {"lm": weights[1], **arrays}
    params = {"drafter": own, "rule": made(own)}
    whole = student_of(drafter)
    text, missed = [3, 7, 0, 9, 6, 2, 7, 8], [False, True, False, True, False, False, True, False]
    drafted = [4, 5, 1, 0, 7, 3, 9, 8]  # one more than the token; the first place has nothing before it
    ids, columns = np.asarray(arrays["ids"]).tolist(), np.asarray(arrays["columns"]).tolist()
    spell = lambda token: np.asarray(arrays["spelling"][token, : int(arrays["counts"][token])]).tolist()
    taught, labels, chances = log_probs(target, weights[0], text), [], []
    for i, token in enumerate(drafted):
        if i and token - 1 in ids:
            before = sum(map(spell, text[:i]), [])
            scores = log_probs(whole.omni.lm.lm, weights[1], before)[-1, columns]
            mine = scores[ids.index(token - 1)] - np.log(np.exp(scores).sum())
            labels.append(min(1, np.exp(taught[i - 1, token - 1] - mine)))
            after = read_text(whole.omni.lm.lm, weights[1], [*before, *spell(token - 1)])[1]
            chances.append(float(jnp.exp(accept_log_prob(params["rule"], after[-1:]))[0]))
    assert 2 < len(labels) < 7 and 0 < np.min(labels) < 1
    labels, chances = np.asarray(labels), np.asarray(chances)
    entropy = labels * np.log(chances) + 6 * (1 - labels) * np.log(1 - chances)
    texts = {name: jnp.asarray([array]) for name, array in (("tokens", text), ("missed", missed), ("drafted", drafted))}
    of = lambda one: jax.jit(jax.value_and_grad(lambda own, fixed: one.loss(target, own, fixed, weights[0], texts)))
    learning, fixed = whole.learns(params), whole.fixed(params)
    (found, grads), (hybrid, of_hybrid) = (
        of(one)(own, fixed) for one, own in ((whole, learning), (student, learning["draft"]))
    )
    assert float(found - hybrid) == pytest.approx(-entropy.sum() / (labels + 6 * (1 - labels)).sum(), rel=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads["draft"], of_hybrid)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads["head"]))


@pytest.mark.slow
def test_drafted_tokens_are_recorded_where_the_target_judges_them():
    target, draft = pair()
    lm, own = shared(draft, target)
    drafter, made = ruled(OmniDraft(lm))
    decoder = specjax.speculative(target.lm, student_of(drafter).drafter)
    models = {"target": target.params, "draft": {"drafter": own, "rule": made(own)}}
    prompts = Prompts.of([[3, 4, 5, 6], [7, 8]], [17, 20], eos=[11], temperature=1.0)
    state, step = jax.jit(lambda models: decoder.init(models, prompts, capacity=32))(models), jax.jit(decoder.step)
    wanted, seen = np.zeros((2, 32), int), 0
    while not bool(state.done.all()):
        before = np.asarray(state.length)
        state, info = step(models, state)
        for row in range(2):
            accepted, committed = int(info.verdict.accepted[row]), int(info.verdict.committed[row])
            for depth in range(1, min(accepted + 1, committed) + 1):
                if depth < info.tree.nodes and bool(info.tree.valid[row, depth]):
                    wanted[row, before[row] + depth - 1] = int(info.tree.tokens[row, depth]) + 1
                    seen += depth > accepted
    assert np.array_equal(state.draft[0].drafted, wanted) and seen and (wanted > 0).sum() > seen


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


def begun(target, draft, with_head):
    lm, params = shared(draft, target)
    drafter = OmniDraft(lm, Chain(3))
    if with_head:
        drafter, made = ruled(drafter)
        params = {"drafter": params, "rule": made(params)}
    return OnlineEngine(target, (drafter, params), interval=3, learning_rate=2e-2, length=32)


def served(engine, temperature):
    asked = [engine.request(prompt, max_new_tokens=16, temperature=temperature) for prompt in PROMPTS]
    return list(engine.run(asked, batch_size=2, capacity=64))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "with_head"), [(0.0, False), (0.8, True)])
def test_text_stays_while_the_draft_gets_better(tmp_path, temperature, with_head):
    """Nothing is compiled again, and another engine goes on with what was learnt."""
    target, draft = pair()
    plain = [record.tokens for record in served(Engine(target, drafter="none"), temperature)]
    engine, steps = begun(target, draft, with_head), []
    for turn in range(6):
        records = served(engine, temperature)
        assert [record.tokens for record in records] == plain
        steps.append(sum(record.steps for record in records))
        if turn == 1:
            programs = decoding.run_program._cache_size(), online.update._cache_size()
    assert (decoding.run_program._cache_size(), online.update._cache_size()) == programs
    assert steps[-1] < steps[0] and engine.losses[-1] < engine.losses[0] and len(engine.losses) == 6
    jax.tree.map(np.testing.assert_array_equal, engine.student.learns(engine.params["draft"]), engine.draft_params)
    engine.save(tmp_path / "learnt")
    other = begun(target, draft, with_head)
    other.resume(tmp_path / "learnt")
    for one in (engine, other):
        served(one, temperature)
    jax.tree.map(np.testing.assert_array_equal, other._learnt(), engine._learnt())
