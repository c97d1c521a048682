"""Texts one after the other, each nearer to the aligned distribution: bounds against a slow trie, texts against enumeration."""

import collections
import json
import math

import numpy as np
import pytest
from support.aligned import EOS, NEW, PROMPT, dist, distance, drawn, exact, language, texts
from support.constraints import model
from support.table_lm import Table

import specjax
from specjax import Sampling, cli
from specjax.search import Asap, AsapSearch
from specjax.serve.engine import Engine

ROWS, SAMPLES = 400, 40
CHOICE, LIST = "choice:yes|no|perhaps", 'start: "[" item (/, ?/ item)* "]"\nitem: /[0-9]+/\n'


def allowed(text):
    """The tokens after a beginning of a text, none after its end."""
    state = 0
    for token in text:
        state = language().next(state, token)
    over = len(text) == NEW or text[-1:] == (EOS,)
    return [] if over else np.flatnonzero(language().allowed(state, NEW - len(text))).tolist()


def bounds_after(found, most=math.inf):
    """The bounds of all beginnings after these texts, as sums over all allowed tokens, from the last beginning to the first.

    A bound that was lower stays. What a text says of a beginning that is not kept goes up along that text alone.
    """
    bounds = {(): 1.0}
    for text in found:
        begins = [text[:end] for end in range(len(text))]
        for own in begins:
            if own not in bounds and len(bounds) < most:
                bounds[own] = 1.0
        below = 1.0
        for own in reversed(begins):
            p, part = dist((*PROMPT, *own)), {text[: len(own) + 1]: below}
            whole = sum(p[token] * (bounds | part).get((*own, token), 1.0) for token in allowed(own))
            below = min(whole, bounds.get(own, 1.0))
            if own in bounds:
                bounds[own] = below
    return bounds


def next_text(bounds, text=(), chance=1.0):
    """The distribution of the next text."""
    tokens = allowed(text)
    if not tokens:
        return {text: chance}
    p = dist((*PROMPT, *text))
    weights = [p[token] * bounds.get((*text, token), 1.0) for token in tokens]
    found = {}
    for token, weight in zip(tokens, weights, strict=True):
        found |= next_text(bounds, (*text, token), chance * weight / sum(weights))
    return found


def of_row(state, row):
    """A row's texts in the order in which they were drawn, and its bounds by the beginnings of texts."""
    found, trie = state.found, state.beams
    own = [tuple(text[2:end].tolist()) for text, end in zip(found.tokens[row], found.length[row], strict=True)]
    begins = [()]
    for node in range(1, trie.count[row]):
        begins.append((*begins[trie.parent[row, node]], int(trie.token[row, node])))
    return own, dict(zip(begins, np.exp(trie.log_bound[row, : len(begins)].astype(np.float64)), strict=True))


def test_bounds_are_the_slow_tries_and_texts_become_the_aligned_distributions():
    """The first text has the local distribution. The last ten have the aligned one, as far as these rows can tell."""
    state, last = drawn(AsapSearch(Table(), Asap(SAMPLES, 24)), ROWS)
    evidence, aligned, local = exact()
    first, late = collections.Counter(), collections.Counter()
    for row in range(ROWS):
        own, bounds = of_row(state, row)
        assert own[-1] == last[row]
        first[own[0]] += 1
        late.update(own[-10:])
        if row < 6:
            slow = bounds_after(own)
            assert bounds.keys() == slow.keys()
            np.testing.assert_allclose([bounds[text] for text in slow], list(slow.values()), rtol=1e-4)
            np.testing.assert_allclose(np.exp(state.found.log_evidence[row]), slow[()], rtol=1e-4)
            assert slow[()] > evidence * 0.999
    assert distance(first, local) < 0.1 and distance(first, aligned) > 0.4
    assert distance(late, aligned) < 0.04 and distance(late, local) > 0.4


@pytest.mark.slow
def test_once_everything_was_visited_the_distribution_is_exact():
    state, _ = drawn(AsapSearch(Table(), Asap(4000, 24)), 4)
    evidence, aligned, local = exact()
    begins = {text[:end] for text in aligned for end in range(len(text))}
    whole = 0
    for row in range(4):
        own, bounds = of_row(state, row)
        whole += bounds.keys() == begins
        before = [distance(next_text(bounds_after(own[:count])), aligned) for count in (0, 10, 100)]
        assert abs(before[0] - distance(local, aligned)) < 1e-9 and before[2] < 0.01 < before[0]
        assert distance(next_text(bounds), aligned) < (1e-6 if bounds.keys() == begins else 1e-3)
        assert bounds[()] >= evidence * (1 - 1e-5)
    assert whole > 0


@pytest.mark.slow
def test_a_full_trie_keeps_bounds_that_hold_and_never_rise():
    state, _ = drawn(AsapSearch(Table(), Asap(SAMPLES, 4)), 16)
    before, _ = drawn(AsapSearch(Table(), Asap(SAMPLES // 2, 4)), 16)
    whole = {text: p for text, (p, _) in texts().items()}
    for row in range(16):
        own, bounds = of_row(state, row)
        slow = bounds_after(own, most=4)
        assert len(bounds) == 4 and bounds.keys() == slow.keys()
        np.testing.assert_allclose([bounds[text] for text in slow], list(slow.values()), rtol=1e-4)
        earlier, bounds_then = of_row(before, row)
        assert own[: SAMPLES // 2] == earlier and all(bounds[text] <= bounds_then[text] for text in bounds_then)
        for begin, bound in bounds.items():
            mass = sum(p for text, p in whole.items() if text[: len(begin)] == begin)
            assert bound >= mass / np.prod([dist((*PROMPT, *begin[:i]))[begin[i]] for i in range(len(begin))]) * 0.999


@pytest.mark.slow
def test_the_first_text_is_plain_decodings():
    """At the same seed, for a table, a grammar and a row without a constraint; the last text comes first."""
    pytest.importorskip("llguidance")
    prompts = ["Is it?", [20, 30, 40, 50], "a b a b"]
    asked = [Sampling(constraint=own, temperature=1.0, max_new_tokens=12) for own in (CHOICE, {"grammar": LIST}, None)]
    plain = Engine(model(), decode="plain").generate(prompts, sampling=asked)
    engine = Engine(model(), decode="asap:samples=3,nodes=64")
    found = engine.generate(prompts, sampling=asked, num_return_sequences=3)
    assert [record.tokens for record in found[2::3]] == [record.tokens for record in plain]
    assert {record.text for record in found[:3]} <= {"yes", "no", "perhaps"}
    assert abs(found[6].log_evidence) < 1e-4 and found[0].log_evidence < -1 and found[3].log_evidence < -1
    assert found[0].log_evidence >= max(record.score for record in found[:3]) - 1e-3
    with pytest.raises(ValueError, match="ASAp draws its texts: set a temperature"):
        engine.request("a", constraint=CHOICE)


@pytest.mark.slow
def test_the_command_line_and_lines_of_a_job(capsys, tmp_path):
    job, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    job.write_text(json.dumps({"prompt": "Is it?", "constraint": {"choice": ["yes", "no"]}}) + "\n")
    words = ["generate", "--model", "tiny", "--decode", "asap:samples=4,nodes=32", "--temperature", "1", "--seed", "5"]
    assert cli.main([*words, "--input", str(job), "--output", str(out)]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--constraint", "choice:yes|no", "--json", "Is it?"]) == 0
    line, own = json.loads(out.read_text()), json.loads(capsys.readouterr().out)
    options = {"constraint": "choice:yes|no", "temperature": 1.0, "seed": 5}
    (record,) = specjax.generate("tiny", "Is it?", decode=Asap(4, 32), **options)
    assert line["tokens"] == own["tokens"] == record.tokens and record.text in ("yes", "no")
    assert line["log_evidence"] == own["log_evidence"] == record.log_evidence < 0


def test_what_it_refuses():
    for options in ({"samples": 0}, {"nodes": 0}):
        with pytest.raises(ValueError, match="samples and nodes must be whole numbers from 1 on"):
            Asap(**options)
