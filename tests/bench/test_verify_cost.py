"""The cost of a verdict, at tiny sizes."""

import json

import pytest

from experiments.costs import verify_cost

TINY = ["--vocab", "40", "--tree", "2 | 1 1", "--repeats", "2"]


@pytest.mark.slow
def test_json(capsys):
    assert verify_cost.main([*TINY, "--verifiers", "coupled,recursive,optimal", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == ["coupled", "recursive", "optimal"]
    assert content["coupled"]["ratio"] == 1 and all(own["ms"] > 0 and 0 <= own["kept"] <= 2 for own in content.values())
    assert content["recursive"]["kept"] > content["coupled"]["kept"]  # of draws that do not know of the target's


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--verifiers judge", "it needs parameters, or judges no i.i.d. children"),
        ("--verifiers recursive_wor", "it needs parameters, or judges no i.i.d. children"),
        ("--verifiers frob", "unknown verifier 'frob'"),
        ("--tree x", "tree 'x'"),
        ("--repeats 0", "--repeats must be at least 1"),
    ],
)
def test_bad_options(capsys, words, said):
    assert verify_cost.main([*TINY, *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
