"""Pictures of committed figures: every label can be read, and nothing lies on the figures themselves."""

import importlib.util
import json

import pytest
from support.drawn import covered

from experiments import answers, pictures
from experiments.claims import HERE, config_of
from specjax import viz
from specjax.evaluate.report import picture


def drawn(folder):
    return answers.picture(config_of(HERE / folder), json.loads((HERE / folder / "results.json").read_text()))


@pytest.mark.parametrize("folder", ("policies", "free_dave"))
def test_right_answers_and_speed_are_bars_with_a_name_each(folder):
    figure = drawn(folder)
    assert covered(figure) == []
    fast = figure.axes[0]
    widths = [bar.get_width() for bar in fast.patches]
    assert widths == sorted(widths) and len(fast.get_yticklabels()) == len(widths)


def test_many_drafters_side_by_side():
    report = pictures.of_bench(*pictures.BENCHES["drafters/greedy"])
    assert len(report.rows) == 23
    assert covered(viz.speedup(report)) == covered(viz.acceptance(report)) == []


def test_a_legend_covers_no_answers():
    found = pictures.of_eval("diffusion/eval")
    assert [round(row.tokens_per_step, 2) for row in found.rows[:2]] == [0.7, 3.23], "as the page has them"
    assert covered(picture(found)) == []


def test_no_differences_are_a_figure_too():
    spec = importlib.util.spec_from_file_location("reproducibility", HERE / "reproducibility/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (axes,) = module.picture(json.loads((HERE / "reproducibility/results.json").read_text())["rows"]).axes
    assert [text.get_text() for text in axes.texts] == ["0 of 80"] * 12 and axes.get_ylim() == (0, 5)
