"""Every planted fault finds its place, and is caught by a test of the fast set."""

import ast
from pathlib import Path

import pytest
from support.collected import not_in_the_fast_set

from tests.faults.__main__ import main
from tests.faults.run import caught_by
from tests.faults.table import FAULTS, Fault, planted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_its_place(name):
    """Where this fails, the source has changed: say in `tests/faults/table.py` where the fault is planted now."""
    fault = FAULTS[name]
    source = (ROOT / fault.file).read_text()
    assert ast.dump(ast.parse(planted(fault, source))) != ast.dump(ast.parse(source))


def test_the_command_says_what_cannot_be_planted(monkeypatch, capsys):
    monkeypatch.setitem(FAULTS, "nowhere", Fault("nothing", "specjax/state.py", "no such line", "", ()))
    monkeypatch.setitem(FAULTS, "anywhere", Fault("nothing", "specjax/state.py", "import", "", ()))
    assert main(["nowhere", "anywhere"]) == 1
    said = capsys.readouterr().out
    assert "NOT PLANTED: specjax/state.py has 'no such line' 0 times" in said
    assert said.count("NOT PLANTED") == 2 and said.endswith("0 of 2 faults are caught\n")


def test_the_command_refuses_an_unknown_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["no such fault"])
    assert "unknown fault 'no such fault'; choose residual, path" in capsys.readouterr().err


@pytest.mark.slow
def test_tests_that_catch_faults_are_in_the_fast_set(request):
    asked = {test for fault in FAULTS.values() for test in fault.tests}
    assert not not_in_the_fast_set(request.session, asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    assert caught_by(name)
