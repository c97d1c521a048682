"""The heads that are shipped for SmolLM2: found by their names, with plain decoding's text, in fewer steps."""

import os

import pytest

import specjax
from experiments.smollm2 import lossy, settings, spec, times
from experiments.smollm2.page import HERE, report
from specjax import models
from specjax.draft.heads.folder import shipped_heads
from specjax.models import ModelError
from specjax.models.gguf import finding

ASKED = ["What is the capital of France?", "Write three short tips for learning to cook."]
NAMES = [name.partition("-")[2] for name in shipped_heads() if name.startswith("smollm2-") and "judge" not in name]
"""Of drafters: `judge` is a rule."""


def test_the_shipped_heads_are_of_the_recipe():
    assert sorted(NAMES) == sorted(spec.SHIPPED)
    assert sum(file.stat().st_size for name in NAMES for file in shipped_heads()[f"smollm2-{name}"].iterdir()) < 25e6


def test_the_page_says_what_its_files_do():
    page = (HERE / "README.md").read_text()
    assert spec.written(page) == page, "run python -m experiments.smollm2.spec --show"
    for other in (lossy, settings, times):
        assert other.written(page) == page, f"run python -m {other.__name__} --show"
    assert all(row["changed"] == 0 for row in report("lossy")["rows"] if row["way"] == "coupled")
    assert spec.there() == list(spec.RUNS) and (HERE / "smollm2.png").exists()
    for name in spec.RUNS:
        ours = [row for row in report(name)["rows"] if " " not in row["decoder"]]
        assert all(row["overall"]["mean_accepted"] >= 1 for row in ours)


@pytest.mark.slow
@pytest.mark.covers("smollm2", "eagle3")
def test_their_text_is_plain_decodings():
    try:
        model = models.load(finding.installed("smollm2"))
    except ModelError as error:
        if os.environ.get("SPECJAX_REAL_MODELS"):
            raise
        pytest.skip(str(error))
    texts = {}
    for name in ("none", *NAMES):
        records = specjax.generate(model, ASKED, chat=True, drafter=name, max_new_tokens=32)
        texts[name] = [record.tokens for record in records]
        steps = sum(record.steps for record in records)
        assert name == "none" or steps < 0.8 * sum(map(len, texts[name])), name
    assert all(text == texts["none"] for text in texts.values())
