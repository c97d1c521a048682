"""What a constraint's table costs a step, and the schemas that texts of an experiment are written for."""

import json

import pytest

from experiments.constraints.__main__ import COUNT, main, schema
from experiments.costs import constraint_cost
from specjax.constrain.schema import expression


@pytest.mark.slow
def test_the_command_measures_free_and_constrained_steps(capsys):
    words = ("--model", "tiny-draft", "--batch-size", "2", "--steps", "3", "--repeats", "1", "--json")
    assert constraint_cost.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["none", "prompt_lookup"]
    assert all(own["free_ms"] > 0 and own["constrained_ms"] > 0 and own["ratio"] > 0 for own in found.values())


def test_the_schemas_grow(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    written = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert written == [schema(number) for number in range(COUNT)]
    sizes = [len(expression(own)) for own in written]
    assert sum(sizes[-5:]) > 5 * sum(sizes[:5])
    assert main([]) == 2 and "give one folder" in capsys.readouterr().err
