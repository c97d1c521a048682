"""The page on drafters says what its reports do."""

import json
import tomllib

import pytest

from experiments.drafters.equal import SECONDS, heads
from experiments.drafters.report import CLAIMS, HERE, MARKED, written
from specjax import models
from specjax.bench.prompts import questions
from specjax.serve.engine import Engine


def test_the_page_says_what_the_reports_do():
    page = (HERE / "README.md").read_text()
    assert written(page) == page, "run experiments/drafters/report.py"
    assert {"greedy", "sampled", "wide", "wide_greedy", "wide_sampled"} <= {*MARKED.findall(page)}


def test_all_heads_had_about_the_same_seconds():
    """Every head of the recipe, HASS and Dovetail: as many seconds as updates allow, and a claim beside."""
    rows = {row["head"]: row for row in json.loads((HERE / "equal.json").read_text())}
    assert rows.keys() == heads(tomllib.loads((HERE / "config.toml").read_text())).keys() == CLAIMS.keys()
    assert all(0.75 * SECONDS < row["seconds"] < 1.3 * SECONDS for row in rows.values())
    for how in ("greedy", "sampled"):
        assert [row["decoder"] for row in json.loads((HERE / f"equal_{how}.json").read_text())["rows"]] == list(rows)


HEADS = (
    "kangaroo", "mtp", "dflash", "dspark", "jetspec", "peagle", "ppd", "clover2", "mlp_speculator", "lstm_speculator", "fspad",
    "clover", "falcon", "griffin", "hidden_transfer", "domino", "dflash2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_shipped_heads_draft_for_the_target(name):
    """By their names alone: plain decoding's text, in a good deal fewer steps."""
    target = models.load("tiny", dtype="float32")
    found = []
    for drafter in ("none", name):
        engine = Engine(target, drafter=drafter)
        found.append(
            list(engine.run([engine.request(p, max_new_tokens=24) for p in questions(3, ["json", "code", "edit"])]))
        )
    plain, drafted = found
    assert [record.tokens for record in plain] == [record.tokens for record in drafted]
    assert 1.2 * sum(record.steps for record in drafted) < sum(record.steps for record in plain)
