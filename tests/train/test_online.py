"""Online learning of a draft: same text throughout, faster on what repeats, and only from corrections."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny

import specjax
from specjax import decoder as decoding
from specjax.draft import ModelDrafter, NgramMod
from specjax.expand import Chain, TopK
from specjax.lm import Wants
from specjax.models import TabularLM
from specjax.objectives.base import Batch, read
from specjax.objectives.losses import TVD
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve import online
from specjax.serve.engine import Engine
from specjax.serve.online import OnlineEngine
from specjax.serve.students import Watching, student_of

TARGET = tiny.model(tiny.TARGET, tiny.target_params())
DRAFT = tiny.model(tiny.DRAFT, tiny.draft_params())
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def requests(engine, temperature=0.0, prompts=PROMPTS):
    return [engine.request(prompt, max_new_tokens=24, temperature=temperature) for prompt in prompts]


def serve(engine, temperature=0.0, **options):
    """Texts and tokens per step of a stream."""
    records = list(engine.run(requests(engine, temperature), batch_size=1, capacity=128, **options))
    return [record.tokens for record in records], sum(r.new_tokens for r in records) / sum(r.steps for r in records)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.slow
def test_text_stays_while_the_draft_gets_better_and_nothing_is_compiled_again(temperature):
    plain, _ = serve(Engine(TARGET, drafter="none"), temperature)
    engine = OnlineEngine(TARGET, DRAFT, Chain(3), interval=2, learning_rate=2e-2, length=32)
    speeds = []
    for turn in range(16):
        texts, speed = serve(engine, temperature)
        assert texts == plain
        speeds.append(speed)
        if turn == 0:  # three records: one update, one record waits
            assert len(engine.losses) == 1
        if turn == 1:  # by now first and learnt parameters have met every program
            programs = decoding.run_program._cache_size(), online.update._cache_size()
    assert len(engine.losses) == 24
    assert (decoding.run_program._cache_size(), online.update._cache_size()) == programs
    assert speeds[-1] > speeds[0] + 0.5
    assert engine.losses[-1] < 0.8 * engine.losses[0]
    # the engine's parameters are the learnt ones; the caller's are as they were
    jax.tree.map(np.testing.assert_array_equal, engine.params["draft"], engine.draft_params)
    assert engine.params["draft"]["norm"]["scale"] is not DRAFT.params["norm"]["scale"]
    jax.tree.map(np.testing.assert_array_equal, DRAFT.params, tiny.draft_params())


def test_without_a_correction_there_is_no_update():
    engine = OnlineEngine(TARGET, DRAFT, Chain(3), interval=1)
    served = engine.params["draft"]
    tokens = tiny.rows(2).tokens
    for missed in (np.zeros(16, bool), np.arange(16) < 1):  # nothing stands before a text's first token
        engine._learn({"tokens": tokens, "missed": np.broadcast_to(missed, tokens.shape)})
    assert engine.losses == [] and engine.params["draft"] is served


@pytest.mark.slow
def test_missed_tokens_are_those_that_end_a_step_too_early():
    markov = TabularLM(32)
    decoder = specjax.speculative(markov, Watching(tiny.DRAFT, TopK(k=3, depth=2, nodes=6)))
    models = {"target": markov.init(jax.random.key(0), 3.0), "draft": tiny.draft_params()}
    prompts = Prompts.of([[1, 2, 3, 4], [5, 6]], [17, 20], eos=[11], temperature=1.0)
    make = jax.jit(
        lambda keys: decoder.init(models, dataclasses.replace(prompts, keys=keys), capacity=32),
    )
    step = jax.jit(decoder.step)
    missed = 0
    for seed in range(4):
        state = make(row_keys(seed, ["a", "b"]))
        wanted = np.zeros((2, 32), bool)
        while not bool(state.done.all()):
            before = np.asarray(state.length)
            state, info = step(models, state)
            after = np.asarray(state.length)
            for row in range(2):
                accepted = int(info.verdict.accepted[row])
                if after[row] == before[row] + accepted + 1 and accepted < 2:
                    wanted[row, after[row] - 1] = True
        assert np.array_equal(state.draft.missed, wanted)
        missed += wanted.sum()
    assert missed > 10


def test_the_logits_before_a_corrected_token_are_taught():
    tokens = jnp.asarray(tiny.rows(2).tokens)
    missed = jnp.zeros(tokens.shape, bool).at[0, 5].set(True).at[1, 9].set(True).at[1, 0].set(True)
    target, draft = tiny.TARGET, tiny.DRAFT
    student = student_of(ModelDrafter(draft))
    texts = {"tokens": tokens, "missed": missed}
    moments = lambda: online._optimizer(1e-3).init(tiny.draft_params())
    update = lambda texts: online.update(
        target, student, 1e-3, tiny.draft_params(), (), moments(), tiny.target_params(), texts
    )
    new, _, loss = update(texts)
    dists = [
        jax.nn.log_softmax(
            jax.jit(lambda p, lm=lm: read(lm, p, Batch(tokens, missed), Wants(logits=True)).logits)(params)
        )
        for lm, params in ((target, tiny.target_params()), (draft, tiny.draft_params()))
    ]
    at = jnp.asarray([0, 1]), jnp.asarray([4, 8])  # slot 0 has nothing before it
    log_p, log_q = (dist[at] for dist in dists)
    np.testing.assert_allclose(loss, (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean(), rtol=1e-5)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), new, tiny.draft_params())))
    # what comes after the last corrected token is not even looked at
    other = tokens.at[1, 9:].set(3).at[0, 5:].set(3)
    again = update({**texts, "tokens": other})[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new, again)


@pytest.mark.slow
def test_long_texts_are_learnt_from_at_their_end():
    engine = OnlineEngine(TARGET, DRAFT, Chain(3), interval=4, length=8, divergence=TVD())
    texts, _ = serve(engine)
    assert len(engine._buffer) == 3 and engine.losses == []
    for kept, text in zip(engine._buffer, texts, strict=True):
        assert kept["tokens"].tolist() == text[-8:] and kept["missed"].shape == (8,) and kept["missed"].any()
    serve(engine)
    assert len(engine.losses) == 1 and len(engine._buffer) == 2


def test_a_half_precision_draft_learns_in_full_precision():
    half = dataclasses.replace(DRAFT, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), DRAFT.params))
    engine = OnlineEngine(TARGET, half, Chain(3), learning_rate=1e-3)
    tokens = tiny.rows(2).tokens
    before = engine.draft_params
    engine._learn({"tokens": tokens, "missed": np.ones(tokens.shape, bool)})
    kinds = lambda tree: {leaf.dtype.name for leaf in jax.tree.leaves(tree)}
    assert kinds(engine.params["draft"]) == {"bfloat16"} and kinds(engine.draft_params) == {"float32"}
    moved = jax.tree.map(lambda a, b: bool((a != b).all()), before["norm"], engine.draft_params["norm"])
    assert moved["scale"]  # by less than bfloat16 can tell near 1


def learning(**options):
    options = {"interval": 2, "length": 16, "learning_rate": 1e-2} | options
    return OnlineEngine(TARGET, DRAFT, Chain(3), **options)


@pytest.mark.slow
def test_an_engine_goes_on_exactly_where_another_stopped(tmp_path):
    file = tmp_path / "learnt.safetensors"
    whole = learning()
    serve(whole)  # three records: one update, one text waits
    whole.save(file)
    serve(whole)
    again = learning()
    again.resume(file)
    assert len(again.losses) == 1 and len(again._buffer) == 1
    jax.tree.map(np.testing.assert_array_equal, again.params["draft"], again.draft_params)
    programs = decoding.run_program._cache_size(), online.update._cache_size()
    serve(again)
    assert (decoding.run_program._cache_size(), online.update._cache_size()) == programs
    assert again.losses == whole.losses and len(again.losses) == 3
    jax.tree.map(np.testing.assert_array_equal, again._learnt(), whole._learnt())
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_files_of_other_drafts_are_refused(tmp_path):
    file, engine = tmp_path / "learnt.safetensors", learning()
    engine.save(file)
    before = engine.draft_params
    with pytest.raises(ValueError, match="of another draft model or length .they differ in missed."):
        learning(length=8).resume(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(ValueError, match="cannot read what a draft learnt from"):
            engine.resume(wrong)
    assert engine.draft_params is before
    file.write_bytes(whole)
    engine.resume(file)
    jax.tree.map(np.testing.assert_array_equal, engine.draft_params, before)


def test_bad_options():
    for options in ({"interval": 0}, {"length": 1}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match="online: interval must be at least 1, length at least 2"):
            OnlineEngine(TARGET, DRAFT, **options)
    with pytest.raises(ValueError, match="a ModelDrafter or an OmniDraft learns, .* and NgramMod does not"):
        OnlineEngine(TARGET, (NgramMod(), None))
    other = tiny.model(TabularLM(16), {})
    with pytest.raises(ValueError, match="share one vocabulary"):
        OnlineEngine(TARGET, other)
