"""Right answers and speed from the same runs: what is computed of measured rows, and every page against its results."""

import json
import zlib

import pytest

from experiments import answers
from experiments.answers import best, between, page, pieces, run, said, speed, tables
from experiments.claims import HERE, config_of

FOLDERS = sorted(file.parent.name for file in HERE.glob("*/config.toml") if "eval" in config_of(file.parent))
OPTIONS = '[eval]\nmodel = "tiny-diffusion"\nfamilies = ["json", "fill"]\nlimit = 1\nmax_new_tokens = 8\n'
CONFIG = {
    "eval": {},
    "groups": [
        {"called": "One", "decoders": ["slow", "fast"]},
        {"called": "Two", "decoders": ["late"]},
        {"called": "Long", "eval": {"limit": 9}, "decoders": ["slow"]},
    ],
    "pairs": [{"of": "fast", "against": "slow"}, {"of": "fast", "against": "missing"}],
}


def row(line, right, passes, cpu, text="", own=()):
    count = len(right)
    written = "".join(f"{zlib.crc32(f'{text}{index}'.encode()):08x}" for index in range(count))
    return {
        "line": line, "eval": dict(own), "cpu_seconds": cpu, "seconds": cpu, "tokens": [10] * count,
        "passes": [passes] * count, "right": right, "families": ["fill"] * count, "texts": written,
    }  # fmt: skip


ROWS = [row("slow", "1" * 60 + "0" * 40, 20, 10.0), row("fast", "1" * 55 + "0" * 45, 5, 2.0, "other")]
REPORT = {"settings": {}, "rows": [*ROWS, row("late", "1" * 60 + "0" * 40, 4, 1.0)]}


def test_rows_are_compared_with_the_first_of_the_same_options():
    text = "\n".join(tables(CONFIG, REPORT))
    assert "| `slow` | 60.0% (50.2 to 69.1) | 0.50 | 20.0 | 100.0 | 1.00 |  |  |" in text
    assert "| `fast` | 55.0% (45.2 to 64.4) | 2.00 | 5.0 | 500.0 | 5.00 | -5.0 (-" in text
    assert "| `late` | 60.0% (50.2 to 69.1) | 2.50 | 4.0 | 1000.0 | 10.00 | +0.0 (" in text and "same text |" in text
    assert "Long" not in text and "missing" not in text
    assert text.count("| `fast` | `slow` | 4.00 | 4.00 to 4.00 | 5.00 | -5.0 (") == 1


def test_what_is_not_resolved_says_how_many_questions_would_tell():
    few = row("few", "1" * 59 + "0" * 41, 5, 1.0, "other")
    found, words = said(few, ROWS[0])
    assert (found.better, found.worse) == (0, 1) and words.startswith("not resolved: the interval reaches -")
    assert words.endswith("; ask 385")  # 38,416 times one in a hundred
    assert said(row("bad", "1" * 50 + "0" * 50, 5, 1.0, "other"), ROWS[0])[1].startswith("costs 10.0 points")


def test_the_front():
    assert [found["line"] for found in best([*ROWS, row("bad", "0" * 100, 5, 5.0), row("quick", "0" * 100, 5, 0.5)])] == [
        "quick", "fast", "slow",
    ]  # fmt: skip
    assert speed(ROWS[1]) == 500 and between({"of": "fast", "against": "missing"}, REPORT) is None


@pytest.mark.parametrize("name", FOLDERS)
def test_a_page_says_what_its_results_do(name):
    """Of folders that have none yet: that the page has a place for them, and that pairs are among the decoders."""
    folder = HERE / name
    config, text = config_of(folder), (folder / "README.md").read_text()
    known = {line for _, own, line in pieces(config) if not own}
    assert {pair[side] for pair in config.get("pairs", []) for side in ("of", "against")} <= known
    assert "<!-- measured -->" in text and f"python -m experiments.answers {name}" in text
    if (folder / "results.json").exists():
        report = json.loads((folder / "results.json").read_text())
        assert page(text, config, report, name) == text, f"run python -m experiments.answers {name} --show"
        assert (folder / f"{name}.png").exists() and report["settings"]["eval"] == config["eval"]
        asked = {answers.key(own, line) for _, own, line in pieces(config)}
        assert {answers.key(row["eval"], row["line"]) for row in report["rows"]} == asked


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text(
        OPTIONS + '[[groups]]\ncalled = "One"\ndecoders = ["decode=fixed:steps=1,block_length=8", '
        '"decode=fixed:steps=2,block_length=8,cache=none"]\n'
    )
    (tmp_path / "README.md").write_text("<!-- measured -->\n<!-- end -->\n")
    first = run(tmp_path, most=1)
    assert [row["line"] for row in first["rows"]] == ["decode=fixed:steps=1,block_length=8"]
    assert first["rows"][0]["passes"] == [1, 1] and len(first["rows"][0]["right"]) == 2
    both = run(tmp_path)
    assert both["rows"][0] == first["rows"][0] and both["rows"][1]["passes"] == [2, 2]
    answers.shown(tmp_path)
    assert (
        "steps=2" in (tmp_path / "README.md").read_text() and (tmp_path / f"{tmp_path.name}.png").stat().st_size > 1000
    )
    monkeypatch.setattr(answers, "digest", lambda params: "other weights")
    monkeypatch.setattr(answers, "measured", lambda options, own, line, model: {"line": line})
    assert [row["line"] for row in run(tmp_path, most=1)["rows"]] == ["decode=fixed:steps=1,block_length=8"]
