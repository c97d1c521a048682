"""`specjax eval --select` and `--uncertainty`: one of several completions is the answer, and what all of them took counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.small_eval import FEW

import specjax
from specjax.evaluate import evaluate
from specjax.evaluate.statistics import auroc

OPTIONS = {"drafter": "none", "batch_size": 4, "max_new_tokens": FEW}
SELECT = "temperature=1;num_return_sequences=3;select="


@pytest.mark.slow
def test_a_selection_answers_beside_greedy_decoding(small, own):
    """Its answers are what `generate` takes, and it costs three completions."""
    lines = [json.loads(line) for line in Path(own).read_text().splitlines()]
    asked = [{"prompt": line["prompt"], "id": line["id"]} for line in lines]
    found = evaluate(small, questions=own, compare=(f"{SELECT}self_certainty", f"{SELECT}majority"), **OPTIONS)
    assert [row.decoder for row in found.rows] == ["drafter=none", f"{SELECT}self_certainty", f"{SELECT}majority"]
    assert [row.steps_per_answer for row in found.rows] == [FEW, 3 * FEW, 3 * FEW]
    assert found.rows[1].to_json()["steps_per_answer"] == 3 * FEW and found.rows[1].cost.tokens == 3 * FEW * len(lines)
    for row, line in zip(found.rows[1:], ("self_certainty", "majority"), strict=True):
        taken = specjax.generate(
            small, asked, select=line, num_return_sequences=3, temperature=1.0, progress=False, **OPTIONS
        )
        assert [answer.text for answer in row.answers] == [record.text for record in taken]
        assert {(answer.steps, answer.tokens, answer.sample) for answer in row.answers} == {(3 * FEW, FEW, 0)}


@pytest.mark.slow
def test_uncertainty_is_the_negative_log_likelihood(run, own, tmp_path):
    answers = tmp_path / "answers.jsonl"
    status, out, err = run("--questions", own, "--drafter", "none", "--uncertainty", "--answers", answers, "--json")
    assert status == 0 and "with AUROC" in err and "(95% " in err and "1 wrong, 3 right" in err
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    wrong = [not line["right"] for line in lines]
    area = np.mean([a["nll"] > b["nll"] for a in lines if not a["right"] for b in lines if b["right"]])
    found = json.loads(out)["auroc"]
    assert sum(wrong) == 1 and found["area"] == pytest.approx(area, abs=1e-3) and found["low"] <= area <= found["high"]


REFUSED = (
    (["--select", "majority"], "set num_return_sequences to 2 or more"),
    (["--num-return-sequences", "2"], "num_return_sequences is for select"),
    (["--compare", "num_return_sequences=2;select=majority"], "set a temperature, or leave select out"),
    (
        ["--num-return-sequences", "2", "--select", "majority", "--temperature", "1", "--samples", "2"],
        "leave samples out",
    ),
    (["--num-return-sequences", "2", "--select", "best", "--temperature", "1"], "unknown selection 'best'"),
    (["--decode", "beam:num_beams=2", "--uncertainty"], "records of a beam search carry a score"),
)


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda case: str(case)[:60])
def test_what_cannot_be_selected(run, words, said):
    status, out, err = run("--families", "lists", "--limit", 2, *words)
    assert (status, out) == (2, "") and err.count("\n") == 1 and said in err


def test_auroc_is_mann_and_whitneys():
    """Ties among them; and its interval covers as often as it says, for scores of two normal distributions and few
    questions."""
    from scipy.stats import mannwhitneyu, norm

    rng = np.random.default_rng(0)
    scores, wrong = rng.integers(0, 9, 60).astype(float), rng.random(60) < 0.4
    u = mannwhitneyu(scores[wrong], scores[~wrong]).statistic
    assert auroc(scores, wrong).area == pytest.approx(u / (wrong.sum() * (~wrong).sum()))
    apart = auroc(np.arange(20.0), np.arange(20) >= 8)
    assert apart.area == apart.high == 1 and 0.7 < apart.low < 0.95 and (apart.positive, apart.negative) == (12, 8)
    mirrored = auroc(-np.arange(20.0), np.arange(20) >= 8)
    assert (mirrored.area, mirrored.low) == (0, 0) and mirrored.high == pytest.approx(1 - apart.low)
    for gap in (0.5, 2.0):
        labels, true = np.arange(45) < 15, norm.cdf(gap / np.sqrt(2))
        every = [auroc(rng.normal(gap * labels), labels) for _ in range(1000)]
        inside = np.mean([found.low <= true <= found.high for found in every])
        assert 0.93 < inside < 0.99, gap
    with pytest.raises(ValueError, match="a positive and a negative"):
        auroc(np.zeros(3), np.zeros(3, bool))


@pytest.mark.slow
def test_the_likelihood_of_a_record_is_the_score_of_its_text(small):
    record = specjax.generate(small, "import os", logprobs=True, **OPTIONS)[0]
    (score,) = specjax.score(small, "import os", [record.tokens])
    assert record.nll == pytest.approx(-score.logprob, rel=1e-4) and record.to_json()["nll"] == record.nll > 0
    assert "nll" not in specjax.generate(small, "import os", **OPTIONS)[0].to_json()
