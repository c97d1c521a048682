"""The cost of a step, at tiny sizes."""

import json

import pytest

from experiments.costs import step_cost

TINY = "--hidden 16 --layers 1 --heads 2 --intermediate 24 --vocab 40 --capacity 64 --prefix 20 --steps 4 --repeats 2"


@pytest.mark.slow
def test_json(capsys):
    assert step_cost.main([*TINY.split(), "--nodes", "1,4", "--peer", "none", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == ["step_ms", "transformers_ms_per_token"]
    assert list(content["step_ms"]) == ["1", "4"] and all(ms > 0 for ms in content["step_ms"].values())
    assert content["transformers_ms_per_token"] is None


@pytest.mark.slow
def test_peer(capsys):
    assert step_cost.main([*TINY.split(), "--nodes", "1"]) == 0
    out = capsys.readouterr().out
    assert "N=1" in out and "transformers" in out and "forward loop" in out


def test_a_free_chain_is_never_accepted_and_costs_one_token_a_step():
    shape = step_cost.Shape(16, 1, 2, 24, 40, 64, 20)
    from specjax import decoder as decoding

    steps = []
    original = decoding.run

    def spy(*args):
        state = original(*args)
        steps.append((state.stats.steps.tolist(), state.stats.accepted.tolist(), (state.length - 20).tolist()))
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "run", spy)
        assert step_cost.ours(shape, [4], 4)[4]() > 0
    assert steps == [([4], [[4, 0, 0, 0]], [4])]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 1,x", "--nodes must be a comma list of integers"),
        ("--nodes 0", "at least 1"),
        ("--heads 5", "--hidden 768"),
        ("--capacity 100", "need a --capacity of"),
        ("--repeats 0", "--repeats"),
        ("--frob", "unrecognized arguments"),
    ],
)
def test_bad_options(capsys, words, said):
    assert step_cost.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
