"""What a warper costs, beside a sort."""

import json

import numpy as np
import pytest

from experiments.costs import warper_cost


@pytest.mark.slow
def test_the_command_measures_every_warper(capsys):
    words = ("--vocab", "400", "--nodes", "2", "--repeats", "1", "--json")
    assert warper_cost.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == [warper_cost.SORT, *warper_cost.WARPERS] and found[warper_cost.SORT]["ratio"] == 1
    assert all(own["ms"] > 0 for own in found.values())
    assert warper_cost.main(words[:-1]) == 0 and "of a sort" in capsys.readouterr().out


@pytest.mark.slow
def test_each_of_them_cuts():
    options = warper_cost.WarperOptions(vocab=3000, rows=2)
    scores = np.random.default_rng(0).normal(size=(2, 1, 3000)).astype(np.float32)
    kept = {
        name: np.isfinite(warper_cost.warped(options, own)(scores)).sum() for name, own in warper_cost.WARPERS.items()
    }
    assert kept["temperature alone"] == 6000 and kept["top_k=1000"] == 2000
    assert 128 * 2 < kept["top_p=0.95"] < 6000 and 0 < kept["typical_p=0.9"] < 6000  # beyond what is ranked
