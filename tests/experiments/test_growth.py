"""The curves of growth: slopes are those of powers, every axis is measured, and the page has the figures of its file."""

import json

import pytest

from experiments.growth.run import AXES, HERE, exponents, main, measured, page, picture, shown, table


def test_slopes_are_those_of_powers():
    points = [10, 100, 1000]
    assert exponents(points, [5, 5, 5]) == [0.0, 0.0]
    assert exponents(points, [2 * x for x in points]) == [1.0, 1.0]
    assert exponents(points, [x**1.5 for x in points]) == [1.5, 1.5]
    assert exponents([1], [3]) == []
    assert shown("bytes", 512) == "0.5 KiB" and shown("compile", 2.25) == "2.2 s"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("batch", "nodes"))
def test_an_axis_of_steps_is_measured(name):
    found = measured(AXES[name], AXES[name].small)
    assert found["points"] == list(AXES[name].small)
    for quantity in AXES[name].should:
        assert len(found[quantity]) == 2 and min(found[quantity]) > 0
    assert found["operations"][1] > found["operations"][0] and found["bytes"][1] > found["bytes"][0]


@pytest.mark.slow
def test_every_axis_is_measured_by_one_command(tmp_path, capsys):
    assert main(["--small", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "growth.json").read_text())
    assert list(report) == list(AXES)
    for name, own in report.items():
        assert all(len(own[quantity]) == len(own["points"]) for quantity in AXES[name].should)
    assert table(report) in capsys.readouterr().out and (tmp_path / "growth.png").stat().st_size
    assert main(["text", "--small", "--output", str(tmp_path)]) == 0
    again = json.loads((tmp_path / "growth.json").read_text())
    assert {name for name in AXES if again[name] != report[name]} <= {"text"}


def test_an_unknown_axis_is_one_line(capsys, tmp_path):
    assert main(["height", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr()[1].count("\n") == 1 and not (tmp_path / "growth.json").exists()


def test_the_page_has_the_figures_of_its_file():
    report, text = json.loads((HERE / "growth.json").read_text()), (HERE / "README.md").read_text()
    assert page(text, report) == text, "run python -m experiments.growth.run"
    assert report.keys() <= AXES.keys() and picture(report).axes
