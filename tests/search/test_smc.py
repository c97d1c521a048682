"""Particles under a constraint: weights, evidence and texts against enumeration; estimated weights over all orders."""

import collections
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.aligned import distance, drawn, exact, texts
from support.constraints import model, vocabulary
from support.table_lm import Table

import specjax
from specjax import Sampling, cli
from specjax.constrain import grammar
from specjax.search import Smc, SmcSearch
from specjax.search.awrs import weighted_draw
from specjax.serve.engine import Engine
from specjax.state import Finish

ROWS = 1024
CHOICE, LIST = "choice:yes|no|perhaps", 'start: "[" item (/, ?/ item)* "]"\nitem: /[0-9]+/\n'
SIGNS = "start: /[!?*#]{3}/"
PROMPTS = ["Is it?", [20, 30, 40, 50], "a b a b"]


FLAT, ALLOWED = np.asarray([0.3, 0.25, 0.2, 0.15, 0.1]), np.asarray([False, True, False, True, False])
PEAKED, OTHERS = np.asarray([0.7, 0.12, 0.09, 0.06, 0.03]), np.asarray([False, True, True, False, True])


def weights(p, allowed, noise, coins):
    """The tokens and weights of so many draws, whose orders follow from noise `[2, N, V]`."""
    log_p = jnp.broadcast_to(jnp.log(p), noise.shape[1:])
    check = lambda first, second, again: jnp.asarray(allowed)[jnp.stack([first, second], axis=1)]
    token, weight = jax.jit(lambda *given: weighted_draw(log_p, *given, check))(noise, coins)
    return np.asarray(token), np.exp(np.asarray(weight, np.float64))


@pytest.mark.parametrize("tries", (3, *(pytest.param(own, marks=pytest.mark.slow) for own in (1, 2, 4, 5))))
def test_the_mean_weight_over_all_orders_is_the_allowed_tokens_probability(tries):
    orders = np.asarray(list(itertools.permutations(range(5))))
    noise = -np.argsort(orders, axis=1) - np.log(FLAT)
    own = FLAT[orders]
    chance = np.prod(own / (1 - np.cumsum(own, axis=1) + own), axis=1)
    given = np.broadcast_to(noise, (2, *noise.shape)).astype(np.float32)
    token, weight = weights(FLAT, ALLOWED, given, np.zeros((len(orders), 2, tries), np.float32))
    np.testing.assert_allclose(np.bincount(token, chance * weight, 5), FLAT * ALLOWED, atol=1e-6)
    assert (weight == 0).any() == (tries < 4)


@pytest.mark.slow
@pytest.mark.parametrize("tries", (2, 5))
def test_the_mean_weight_of_a_peaked_distribution(tries, count=100_000):
    """Refused tokens count as if they were drawn again. The bound is six standard errors or more."""
    keys = jax.random.split(jax.random.key(0))
    noise, coins = jax.random.gumbel(keys[0], (2, count, 5)), jax.random.uniform(keys[1], (count, 2, tries))
    token, weight = weights(PEAKED, OTHERS, noise, coins)
    for v in range(5):
        own = weight * (token == v)
        assert abs(own.mean() - PEAKED[v] * OTHERS[v]) < 6 * own.std() / count**0.5 + 1e-6
        assert own.std() / count**0.5 < 0.001
    assert len(np.unique(weight)) > 1 and weight.max() <= 1


def evidences(state):
    return np.exp(np.asarray(state.found.log_evidence, np.float64))


def test_texts_and_evidence_are_the_aligned_distributions():
    """The mean of estimates, by texts that are drawn by weight, is each text's probability, to five standard errors."""
    state, found = drawn(SmcSearch(Table(), Smc(6)), ROWS)
    evidence, aligned, local = exact()
    estimates = evidences(state)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - evidence) < 5 * error and error < 0.02 * evidence
    weighted = collections.Counter()
    for text, own in zip(found, estimates, strict=True):
        weighted[text] += own
    assert distance(weighted, aligned) < 0.06 and distance(weighted, local) > 0.4 and set(weighted) <= set(aligned)


@pytest.mark.slow
def test_the_weight_of_one_particle_is_what_the_constraint_left():
    state, found = drawn(SmcSearch(Table(), Smc(1)), ROWS)
    known = texts()
    wanted = [np.log(known[text][0] / known[text][1]) for text in found]
    np.testing.assert_allclose(state.found.log_weights[:, 0], wanted, atol=1e-4)
    assert abs(evidences(state).mean() - exact()[0]) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("how", (Smc(6, weights="awrs"), Smc(3, 1.0)), ids=("awrs", "always"))
def test_other_settings_have_the_same_mean(how):
    state, found = drawn(SmcSearch(Table(), how), 2 * ROWS, seed=1)
    estimates, weighted = np.where(state.finish == Finish.ERROR, 0.0, evidences(state)), collections.Counter()
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - exact()[0]) < 5 * error and error < 0.02 * exact()[0]
    for text, own in zip(found, estimates, strict=True):
        weighted[text] += own
    assert distance({text: own for text, own in weighted.items() if own}, exact()[1]) < 0.06


@pytest.mark.slow
def test_one_particle_writes_what_plain_decoding_writes():
    """At the same seed, for a table and for a grammar whose whole mask is asked for; and free rows stay free."""
    pytest.importorskip("llguidance")
    asked = [Sampling(constraint=own, temperature=1.0, max_new_tokens=12) for own in (CHOICE, {"grammar": LIST}, None)]
    plain = Engine(model(), decode="plain").generate(PROMPTS, sampling=asked)
    engine = Engine(model(), decode="smc:particles=1,weights=exact")
    with pytest.raises(ValueError, match="sequential Monte Carlo draws its texts: set a temperature"):
        engine.request("a", constraint=CHOICE)
    one = engine.generate(PROMPTS, sampling=asked)
    assert [record.tokens for record in one] == [record.tokens for record in plain]
    assert abs(one[2].log_evidence) < 1e-4 and max(one[0].score, one[1].score) < -1


@pytest.mark.slow
@pytest.mark.parametrize("weights", ("auto", "exact"))
def test_texts_of_every_kind_are_in_their_language(weights, monkeypatch):
    """The host is asked about texts that go on alone, not about those that have ended."""
    pytest.importorskip("llguidance")
    asked_for, at = [], grammar._at
    monkeypatch.setattr(grammar, "_at", lambda row, handle, text: asked_for.append(text) or at(row, handle, text))
    engine = Engine(model(), decode=f"smc:particles=4,weights={weights},tries=1536")
    asked = [Sampling(constraint=own, temperature=1.0, max_new_tokens=24) for own in (CHOICE, {"grammar": LIST}, None)]
    records = engine.generate(PROMPTS, sampling=asked, num_return_sequences=4)
    assert not any(record.error for record in records)
    assert asked_for and not any(set(text) & {*vocabulary().eos} for text in asked_for)
    assert {record.text for record in records[:4]} <= {"yes", "no", "perhaps"}
    for record in records[4:8]:
        pattern = r"\[\d+(, ?\d+)*\]"
        assert record.finish_reason == "length" or re.fullmatch(pattern, record.text), record.text
    for own in (records[:4], records[4:8], records[8:]):
        mean = np.logaddexp.reduce([record.score for record in own]) - np.log(4)
        np.testing.assert_allclose([record.log_evidence for record in own], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_estimates_of_a_grammar_agree_with_its_masks():
    """The means of both weights, to five standard errors; every text of this grammar has one way to be written."""
    pytest.importorskip("llguidance")
    asked = Sampling(constraint={"grammar": SIGNS}, temperature=1.5, max_new_tokens=3)
    means = []
    for weights in ("exact", "awrs"):
        engine = Engine(model(), decode=f"smc:particles=8,weights={weights},tries=1536")
        records = engine.generate([PROMPTS[0]] * 48, sampling=asked, batch_size=48)
        own = np.exp([record.log_evidence for record in records])
        means.append((own.mean(), own.std() / len(own) ** 0.5))
    (a, da), (b, db) = means
    assert abs(a - b) < 5 * (da**2 + db**2) ** 0.5 and da < db < 0.3 * a


@pytest.mark.slow
def test_the_command_line_and_lines_of_a_job(capsys, tmp_path):
    job, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    job.write_text(json.dumps({"prompt": "Is it?", "constraint": {"choice": ["yes", "no"]}}) + "\n")
    words = ["generate", "--model", "tiny", "--decode", "smc:particles=4", "--temperature", "1", "--seed", "5"]
    assert cli.main([*words, "--input", str(job), "--output", str(out)]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--constraint", "choice:yes|no", "--json", "Is it?"]) == 0
    line, own = json.loads(out.read_text()), json.loads(capsys.readouterr().out)
    options = {"constraint": "choice:yes|no", "temperature": 1.0, "seed": 5}
    (record,) = specjax.generate("tiny", "Is it?", decode=Smc(4), **options)
    assert line["tokens"] == own["tokens"] == record.tokens and record.text in ("yes", "no")
    assert line["log_evidence"] == own["log_evidence"] == record.log_evidence < 0


def test_what_it_refuses():
    for options, said in (({"particles": 0}, "whole numbers from 1 on"), ({"tries": 0}, "whole numbers from 1 on"),
                          ({"resample_below": 2.0}, "must be in"), ({"weights": "some"}, '"exact" or "awrs"')):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Smc(**options)
