"""`specjax eval --trust` against plain computations: divergence from whole passes' logits, calibration from a loop, and
counts of made-up answers; and what is refused."""

import json
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import models, tasks
from specjax.evaluate.divergence import Text, check, divergences
from specjax.evaluate.questions import own_questions
from specjax.evaluate.report import trust_lines
from specjax.evaluate.results import Answer, Cost, row_of
from specjax.evaluate.statistics import calibration_error, resampled
from specjax.evaluate.trust import BINS, Size, trust_of
from specjax.lm import Block, Wants
from specjax.serve.engine import Engine
from specjax.tasks.generate import family_of

PROMPTS = ("def add(a, b):", "import os\nfor name in range(9):\n    print(name)\n" * 3, "while True")
ROUNDING = 1e-6
"""Nats, of a sum over the vocabulary in float32."""
TEXTS = ([5, 9, 200, 31, 7, 8, 40], [77], [12, 13, 14, 15])


def logits(engine, ids):
    """`[T, V]` of a whole text, read in one pass over an empty cache, whose type its keys and values are rounded to."""
    tokens = jnp.asarray([ids], jnp.int32)
    block = Block(tokens, jnp.arange(len(ids), dtype=jnp.int32)[None], jnp.zeros((1,), jnp.int32))
    lm, params = engine.model.lm, engine.params["target"]
    output = lm(params, block, lm.init_cache(1, len(ids), jnp.float32), wants=Wants(logits=True))
    return np.asarray(output.logits[0], np.float64)


def by_hand(first, other, request, tokens):
    """KL(first, other), summed over the tokens of a text: from logits, by the definition."""
    ids, total = [*request.ids, *tokens], 0.0
    pair = [logits(engine, ids) for engine in (first, other)]
    for at in range(len(request.ids) - 1, len(ids) - 1):
        p, q = (np.exp(own[at] - own[at].max()) for own in pair)
        p, q = p / p.sum(), q / q.sum()
        total += sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    return total


def found(engines, batch_size=2):
    requests = [engines[0].request(prompt, max_new_tokens=8) for prompt in PROMPTS]
    texts = [Text(*pair) for pair in zip(requests, TEXTS, strict=True)]
    capacity = max(engine.capacity(requests) for engine in engines)
    how = {"keys": engines[0].keys(requests), "capacity": capacity, "batch_size": batch_size}
    return texts, divergences(engines, texts, **how)


@pytest.mark.slow
def test_divergence_is_that_of_whole_passes(small):
    """Of weights and of caches in few bits; an equal model has none, with another drafter too."""
    options = [{}, {"weights": "int4"}, {"cache_dtype": "int8"}]
    engines = [Engine(models.load(small, **own), "plain") for own in options]
    engines.append(Engine(engines[0].model, drafter="prompt_lookup"))
    texts, sums = found(engines)
    for engine, own in zip(engines[1:3], sums, strict=False):
        hand = [by_hand(engines[0], engine, text.request, text.tokens) for text in texts]
        assert min(hand) > 1e-5
        np.testing.assert_allclose(own, hand, rtol=2e-3, atol=ROUNDING)
    assert sums[2].tolist() == [0, 0, 0]
    np.testing.assert_allclose(found(engines[:2], batch_size=4)[1], sums[:1], rtol=1e-3, atol=ROUNDING)


@pytest.mark.slow
def test_a_cache_that_forgets_diverges_only_once_it_forgets(small):
    plain = Engine(small, "plain")
    all_kept = Engine(plain.model, "plain:cache=(ems:budget=256,recent=8,chunk=8)")
    few_kept = Engine(plain.model, "plain:cache=(ems:budget=8,recent=8,chunk=8)")
    _, sums = found([plain, all_kept, few_kept])
    assert max(sums[0]) < 1e-4  # no prompt has more tokens than are kept
    assert sums[1][1] > 10 * max(sums[0])  # the second prompt has


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_a_loops(bins):
    rng = np.random.default_rng(bins)
    sure, right = np.append(rng.random(60), [0.0, 1.0, 0.25]), rng.random(63) < 0.6
    total = 0.0
    for m in range(1, bins + 1):
        own = [i for i, p in enumerate(sure) if (m - 1) / bins < p <= m / bins or (m == 1 and p == 0)]
        if own:
            gap = sum(sure[i] for i in own) / len(own) - sum(right[i] for i in own) / len(own)
            total += len(own) / len(sure) * abs(gap)
    assert calibration_error(sure, right, bins) == pytest.approx(total, abs=1e-12)


def test_calibration_error_of_what_is_known():
    assert calibration_error(np.ones(9), np.ones(9), BINS) == 0  # sure and right
    assert calibration_error(np.ones(9), np.zeros(9), BINS) == 1  # sure and wrong
    assert calibration_error(np.full(4, 0.5), np.asarray([1, 0, 1, 0]), BINS) == 0
    for wrong in ([], [1.5], [-0.1]):
        with pytest.raises(ValueError, match="answers with probabilities between 0 and 1"):
            calibration_error(np.asarray(wrong), np.zeros(len(wrong)), BINS)


def test_the_bootstrap_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        drawn = rng.exponential(size=60)
        own = resampled(lambda chosen, drawn=drawn: float(drawn[chosen].mean()), 60, draws=200)
        covered += own.low <= 1.0 <= own.high
        assert own.value == pytest.approx(drawn.mean())
    assert 0.87 < covered / 200 < 0.98
    with pytest.raises(ValueError, match="at least one question"):
        resampled(lambda chosen: 0.0, 0)


def row(name, texts, right, sure, samples=1):
    """A decoder's answers to two families' questions, with made-up texts."""
    answers = [
        Answer(
            name, f"q{i // samples}", "a", "?", text, bool(is_right), 2, 2, "eos", i % samples, -float(np.log(chance))
        )
        for i, (text, is_right, chance) in enumerate(zip(texts, right, sure, strict=True))
    ]
    return row_of(name, answers, Cost(2, 2, 1.0, 1.0))


def test_changed_texts_flips_and_groups_are_counted():
    whole = row("whole", "abcd", [1, 1, 0, 0], [0.9, 0.8, 0.7, 0.6])
    shrunk = row("shrunk", "abXY", [1, 0, 1, 0], [0.9, 0.9, 0.9, 0.9])
    asks = ["knowledge", "copying", "knowledge", None]
    sizes = [Size(100, 40, 16), Size(25, 40, 16)]
    first, second = trust_of([whole, shrunk], asks, np.asarray([[0.2, 0.0, 0.6, 0.0]]), sizes)
    assert first.against is None and first.confidence == pytest.approx(0.75)
    assert first.groups["knowledge"].accuracy == 0.5 and first.groups["copying"].accuracy == 1
    assert first.groups["knowledge"].n == 2 and first.groups["copying"].n == 1
    own = second.against
    assert (own.changed.accuracy, own.changed.n, own.lost, own.gained) == (0.5, 4, 1, 1)
    assert own.points.difference == 0 and own.groups["knowledge"].difference == 0.5
    assert own.groups["copying"].difference == -1
    assert own.divergence.value == pytest.approx(0.8 / 8)  # four texts of two tokens
    assert 0 <= own.divergence.low <= own.divergence.value <= own.divergence.high
    # errors: whole |0.9 - 1|, |0.8 - 1|, |0.7 - 0|, |0.6 - 0| in bins of their own; shrunk |0.9 - 0.5|
    assert own.calibration_change.value == pytest.approx(0.4 - (0.1 + 0.2 + 0.7 + 0.6) / 4)
    told = second.to_json()
    assert told["groups"]["copying"]["points"]["difference"] == -1 and told["changed"]["accuracy"] == 0.5
    assert told["calibration_error"] == 0.4 and told["calibration_change"]["value"] == pytest.approx(0, abs=1e-9)
    assert told["bins"] == BINS and told["parameter_bytes"] == 25 and "changed" not in first.to_json()
    lines = dict(trust_lines([first, second]))
    assert lines["texts that change"] == ["", "50.0% (15.0 to 85.0)"]
    assert lines["right that became wrong, wrong that became right"] == ["", "1, 1"]


def test_several_samples_of_a_question_are_one_question():
    whole = row("whole", "abab", [1, 0, 1, 0], [0.5] * 4, samples=2)
    shrunk = row("shrunk", "abXb", [1, 0, 1, 1], [0.5] * 4, samples=2)
    sums = np.asarray([[0.1, 0.1, 0.3, 0.3]])
    first, second = trust_of([whole, shrunk], [None, None], sums, [Size(1, 1, 1)] * 2)
    own = second.against
    assert (own.changed.accuracy, own.changed.n, own.gained, own.lost) == (0.25, 2, 1, 0)
    assert own.divergence.value == pytest.approx(0.8 / 8) and first.groups == {}


def test_what_families_ask_for_is_in_the_prompt_or_is_not():
    """Words of answers to questions of copying stand in the prompt. A judge repeats a solution, and only the verdict needs
    sums."""
    words = lambda text: re.findall(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]", text)
    for name in tasks.FAMILIES:
        asked = [q for level in (1, 2) for q in tasks.generate(name, level, 7, 20)]
        shares = [np.mean([word in words(q.prompt) for word in words(q.answers[0])]) for q in asked]
        asks = family_of(name).asks
        assert asks in ("knowledge", "copying")
        if name != "judge":
            assert (np.mean(shares) > 0.7) == (asks == "copying"), name


def test_own_questions_say_what_they_ask_for():
    items = own_questions([{"prompt": "a", "answer": "b", "asks": "knowledge"}, {"prompt": "a", "answer": "b"}])
    assert [item.asks for item in items] == ["knowledge", None]
    with pytest.raises(ValueError, match="line 1: asks must be knowledge or copying, not 'sums'"):
        own_questions([{"prompt": "a", "answer": "b", "asks": "sums"}])


@pytest.mark.slow
def test_the_command_tells_trust_in_both_forms(run, own):
    words = ("--questions", own, "--drafter", "none", "--trust", "--compare", "weights=int4")
    status, out, _ = run(*words, "--json")
    assert status == 0
    whole, shrunk = json.loads(out)["trust"]
    assert whole["decoder"] == "drafter=none" and "divergence" not in whole
    assert shrunk["divergence"]["value"] > 0 and shrunk["changed"]["n"] == 4
    assert shrunk["parameter_bytes"] < whole["parameter_bytes"] and shrunk["cache_bytes"] == whole["cache_bytes"]
    status, out, _ = run(*words)
    assert status == 0 and "trust, against drafter=none" in out and "nats per token" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trust"], "trust is of compared models: give the whole model first"),
        (["--trust", "--compare", "decode=beam:num_beams=2"], "decodes by Beam, and divergence by token is of plain"),
    ],
)
def test_what_cannot_be_compared(run, own, words, said):
    status, out, err = run("--questions", own, "--drafter", "none", *words)
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err


def test_models_of_other_vocabularies_and_meshes_are_refused(small):
    own = Engine(small, "plain")
    other = lambda **changed: SimpleNamespace(**({"decode": own.decode, "model": own.model, "mesh": None} | changed))
    check([own, other()], ["whole", "shrunk"])
    fewer = SimpleNamespace(lm=SimpleNamespace(vocab_size=7))
    for engine, said in ((other(model=fewer), "shrunk has 7 tokens and whole"), (other(mesh="data=2"), "another mesh")):
        with pytest.raises(ValueError, match=said):
            check([own, engine], ["whole", "shrunk"])
