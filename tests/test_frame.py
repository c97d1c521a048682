"""The frame of the tests: what they may cost, which slow ones are due, and where the list of failures goes."""

import types

import pytest
from support import costs, turns
from support.methods import FAMILIES, METHODS

FAST = 1660
"""Processor seconds of the whole fast set."""
METHOD, FAMILY = (3.0, 40.0), (1.5, 40.0)
"""Of one, in the fast set and in the slow one."""
OLDER = {
    "acceptance": (5, 40), "beam": (13, 135), "best": (9, 40), "block": (31, 61), "clover2": (4, 40), "coupled": (11, 40),
    "del": (26, 72), "dflash": (4, 40), "diffusion_draft": (3, 87), "diffuspec": (9, 70),
    "draft": (38, 135), "dspark": (4, 40), "dyspec": (8, 40),
    "eagle1": (4, 40), "eagle2": (5, 46), "eagle3": (5, 40), "ears": (8, 40), "ems": (6, 40), "entropy_adaptive": (13, 45),
    "first_finish": (5, 40), "fly": (11, 40), "free_dave": (15, 47), "gear": (4, 40), "gemma2": (11, 40),
    "gemma4_assistant": (4, 101), "greedy_multi": (5, 40), "guided": (19, 40), "hydra": (5, 40), "joint_threshold": (8, 40),
    "judge": (7, 40), "k_seq": (9, 40), "kangaroo": (18, 126), "lantern": (13, 40), "lookahead": (10, 43), "medusa": (6, 40),
    "mirostat": (11, 40), "mtp": (4, 40), "multi_step": (6, 40), "none": (5, 40), "optimal": (25, 98), "peagle": (6, 40),
    "ppd": (12, 40), "prompt_lookup": (22, 40), "recursive": (7, 40), "recursive_wor": (7, 40), "rediff": (5, 40),
    "reflective": (12, 40), "rejection": (13, 40), "rest": (9, 40), "reverse": (6, 40), "self_agreement": (6, 40),
    "small_cache": (4, 40), "spatten": (4, 40), "spec_reason": (10, 40), "speculative_thinking": (9, 40), "stand": (11, 40),
    "stochastic_beam": (12, 40), "superposed": (7, 40), "swift": (25, 91), "token_recycling": (11, 40), "traversal": (5, 40),
    "typical": (7, 40), "wino": (5, 40),
}  # fmt: skip
"""Methods and families that were there before and cost more: they may not cost more than this."""


def test_the_fast_set_costs_no_more_than_it_may():
    spent = {file: fast for file, (fast, _) in costs.declared()["files"].items()}
    dearest = sorted(spent, key=spent.get, reverse=True)[:8]
    assert sum(spent.values()) <= FAST, f"the dearest are {', '.join(f'{file} {spent[file]}' for file in dearest)}"


def test_every_file_says_what_it_costs():
    """`pytest --write-costs` and `pytest -m slow --write-costs` write it."""
    there = {str(file.relative_to(turns.ROOT)) for file in (turns.ROOT / "tests").rglob("test_*.py")}
    said = set(costs.declared()["files"])
    assert there - said == set(), "run these with --write-costs"
    assert said - there == set(), "take these out of tests/costs.json"


@pytest.mark.parametrize("name", sorted(METHODS | FAMILIES))
def test_a_method_costs_no_more_than_it_may(name):
    spent = costs.declared()["methods"].get(name, [0.0, 0.0])
    most = OLDER.get(name, FAMILY if name in FAMILIES - METHODS else METHOD)
    assert spent[0] <= most[0] and spent[1] <= most[1]


def item(test, *covers):
    marks = [types.SimpleNamespace(args=covers)] if covers else []
    return types.SimpleNamespace(nodeid=test, iter_markers=lambda name: marks)


def test_what_changed_is_run_by_name():
    names = turns.names_of(
        ["specjax/draft/eagle3/network.py", "models/families/qwen.py", "docs/train.md", "specjax/draft/base.py",
         "tests/draft/test_mtp.py", "experiments/chip/README.md", "specjax/plan/__init__.py", "pyproject.toml"]
    )  # fmt: skip
    assert names == {"eagle3", "qwen", "train", "chip", "plan"}
    never = next(day for day in range(turns.TURNS) if not turns.of_the_day("tests/a/test_b.py::test_c", day))
    reasons = {
        ("tests/draft/test_eagle3.py::test_c", ()): "changed",
        ("tests/a/test_b.py::test_c[draft-eagle3-1]", ()): "changed",
        ("tests/a/test_b.py::test_c", ("train",)): "changed",
        ("tests/a/test_b.py::test_c[eagle2]", ("kernels",)): None,
        ("tests/a/test_b.py::test_c[1]", ()): "failed not long ago",
    }
    for (test, covers), reason in reasons.items():
        assert turns.why(item(test, *covers), names, never, {"tests/a/test_b.py::test_c[1]": 3}) == reason
    assert turns.why(item("tests/a/test_b.py::test_c"), None, never, {}) == "there is no history"
    cases = [item(f"tests/a/test_b.py::test_{i}[train]") for i in range(400)]
    found = {
        ahead: [turns.why(case, names, never, {}, ahead) == "changed" for case in cases]
        for ahead in (1, 4, turns.TURNS)
    }
    assert all(found[turns.TURNS]), "what changed is run if it is not too much"
    assert all(now <= then for now, then in zip(found[1], found[4], strict=True)), "what comes next is run first"
    assert sum(found[1]) < 100 < 150 < sum(found[4]) < 250


def test_the_turns_have_every_test_and_a_day_has_the_same_ones():
    functions = [f"tests/a/test_{i}.py::test_{j}" for i in range(20) for j in range(20)]
    turns_of = [
        [turns.of_the_day(function, day) for day in range(20_000, 20_000 + turns.TURNS)] for function in functions
    ]
    assert all(sum(one) == 1 for one in turns_of)
    by_day = [sum(column) for column in zip(*turns_of, strict=True)]
    assert min(by_day) > 250 / turns.TURNS, by_day
    parameters = [turns.why(item(f"tests/a/test_1.py::test_1[{i}]"), frozenset(), 20_000, {}) for i in range(5)]
    assert len(set(parameters)) == 1, "what shares fixtures and programs is run together"


def test_a_failure_stays_for_five_good_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "RED", tmp_path / "red")
    assert turns.red() == {}
    turns.write_red(turns.after(turns.red(), ["tests/a.py::test_b[x y]"], []))
    for left in (5, 4, 3, 2, 1):
        assert turns.red() == {"tests/a.py::test_b[x y]": left}
        turns.write_red(turns.after(turns.red(), [], ["tests/a.py::test_b[x y]"]))
    assert turns.red() == {}
    assert turns.after({"a": 2}, ["a"], ["a"]) == {"a": 5}, "a failure begins anew"


def test_a_cost_is_that_of_whom_the_test_is_there_for():
    names = {"eagle3", "draft", "qwen3"}
    whose = {
        "tests/draft/test_eagle3.py::test_a[draft]": "eagle3",
        "tests/test_conformance.py::test_a[draft-top_k]": "draft",
        "tests/test_conformance.py::test_a[eagle3@sinks]": "eagle3",
        "tests/sampling/test_same_text.py::test_a[draft]": None,
        "tests/models/test_families.py::test_a[qwen3]": "qwen3",
    }
    assert {test: costs.owner(test, names) for test in whose} == whose


def test_no_test_is_named_by_an_address(request):
    """Workers that collect the same tests by other names run none."""
    assert [item.nodeid for item in request.session.items if " at 0x" in item.nodeid] == []
