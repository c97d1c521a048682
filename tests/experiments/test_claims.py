"""Claims of papers on the shipped models: what is computed of a bench's laps, and every page against its results."""

import json
import tomllib

import numpy as np
import pytest

from experiments.claims import HERE, by_family, config_of, label, paired, samples, written
from experiments.peers import run as peers
from specjax.bench.options import BenchOptions
from specjax.bench.run import Lap

WITH_RESULTS = sorted(file.parent for file in HERE.glob("*/results.json") if (file.parent / "config.toml").exists())
FOLDERS = [folder.name for folder in WITH_RESULTS if "options" in config_of(folder)]


def lap(each, count=10):
    return Lap([[0] * count for _ in each], 1.0, steps=sum(each), each=tuple(each))


def test_a_pair_is_compared_question_by_question():
    slow, fast = lap([10, 8, 6, 9] * 5), lap([5, 4, 3, 4.5] * 5)
    found = paired({"of": "fast", "against": "slow"}, {"slow": slow, "fast": fast})
    assert found == {"of": "fast", "against": "slow", "ratio": 2.0, "low": 2.0, "high": 2.0}
    mixed = paired({"of": "mixed", "against": "slow"}, {"slow": slow, "mixed": lap([9, 7, 9, 10] * 5)})
    assert mixed["low"] < mixed["ratio"] < 1 < mixed["high"]


def test_every_decoder_has_the_same_questions_drawn():
    assert (samples([1, 2, 3]) * 2 == samples([2, 4, 6])).all() and samples([1, 2, 3]).shape[1] == 3


def test_families_take_turns():
    found = by_family(lap([5, 10, 5, 10]), BenchOptions(tasks="math,edit"))
    assert found == {"math": 2.0, "edit": 1.0}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_page_says_what_its_results_do(name):
    folder = HERE / name
    config = tomllib.loads((folder / "config.toml").read_text())
    report = json.loads((folder / "results.json").read_text())
    page = (folder / "README.md").read_text()
    assert written(page, report, config.get("show", {})) == page, f"run python -m experiments.claims {name} --show"
    assert "<!-- measured -->" in page and f"]({name}.png)" in page and (folder / f"{name}.png").exists()
    runs = len(config.get("runs", [{}]))
    assert [row["line"] for row in report["rows"]] == ["none", *(row["line"] for row in config["decoders"])] * runs
    assert len(report["pairs"]) == runs * len(config.get("pairs", []))
    assert all(row["identical_text"] for row in report["rows"])
    names = {label(row) for row in report["rows"]} | {label(row) for row in config["decoders"]}
    assert all(pair[side] in names for pair in report["pairs"] for side in ("of", "against"))
    assert all(row["low"] <= row["tokens_per_step"] <= row["high"] for row in report["rows"])
    assert np.isfinite([row["ratio_to_plain"] for row in report["rows"]]).all()


def test_the_page_of_peers_says_what_its_files_do():
    page = (peers.HERE / "README.md").read_text()
    assert peers.written(page) == page, "run experiments/peers/run.py --show"
    files = [name for name in peers.TITLES if (peers.HERE / f"{name}.json").exists()]
    assert files and "<!-- measured -->" in page and (peers.HERE / "peers.png").exists()
    for found in map(peers.report, files):
        assert {row["peer"] for row in found["peers"]} == {"transformers", "llama.cpp"}
        assert all(row["identical_text"] and not row["gaps"] for row in found["rows"])
        assert all(row["identical_text"] == (not row["gaps"]) for row in found["peers"])
        assert all(gap < 1e-3 for row in found["peers"] for gap in row["gaps"]), "a peer's text is no near-tie"
