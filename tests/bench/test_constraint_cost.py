"""What a constraint's table costs a step, and the schemas that texts of an experiment are written for."""

import json

import pytest

from experiments.constraints.__main__ import COUNT, main, schema
from experiments.costs import constraint_cost
from specjax.constrain.schema import expression


@pytest.mark.slow
def test_the_command_measures_free_and_constrained_steps(capsys):
    words = [
        "--model",
        "tiny-draft",
        "--drafters",
        "none,forced",
        "--batch-size",
        "2",
        "--steps",
        "3",
        "--repeats",
        "1",
    ]
    assert constraint_cost.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["none", "forced"]
    assert all(own["free_ms"] > 0 and own["constrained_ms"] > 0 and own["ratio"] > 0 for own in found.values())


@pytest.mark.slow
def test_a_text_that_ends_before_the_last_step_is_an_error(capsys, monkeypatch):
    """Here because the shortest text of the schema is longer than the room."""
    monkeypatch.setattr(constraint_cost, "MANY", constraint_cost.MANY | {"minItems": 24})
    words = ("--model", "tiny-draft", "--drafters", "none", "--batch-size", "2", "--steps", "3", "--repeats", "1")
    assert constraint_cost.main(words) == 2
    assert "a text of tiny-draft ends after 1 steps" in capsys.readouterr().err


def test_the_schemas_grow(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    written = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert written == [schema(number) for number in range(COUNT)]
    sizes = [len(expression(own)) for own in written]
    assert sum(sizes[-5:]) > 5 * sum(sizes[:5])
    assert main([]) == 2 and "give one folder" in capsys.readouterr().err
