"""Published step times beside plans: what is read of a figure, and the page against the files."""

import jax
import pytest
from support.planned import skip_without_compiler

from experiments.plan_published import __main__ as beside

ROWS, PLANS = beside.published(), beside.plans()
FIGURES = ("milliseconds", "tokens_per_second", "seconds")
WORDS = ("system", "source", "quoted", "remark")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['topology']}-{row['batch']}")
def test_a_figure_has_a_source_and_a_plan(row):
    """Each is one figure, with what was read, and a plan of the same command whose bound lies below its longest time."""
    assert set(row) <= {*WORDS, *FIGURES, "tokens", *beside.OPTIONS} and all(row[name] for name in WORDS)
    assert row["source"].startswith("https://") and sum(name in row for name in FIGURES) == 1
    plan = PLANS[beside.command(row)]
    assert 0.95 * plan["bytes"] < plan["least"] < plan["most"]


def test_a_step_is_read_in_three_ways():
    assert beside.step_ms({"milliseconds": 3.5, "batch": 2}) == 3.5
    assert beside.step_ms({"tokens_per_second": 4000, "batch": 8}) == 2.0
    assert beside.step_ms({"seconds": 3.0, "tokens": 1000, "batch": 8}) == 3.0


def test_where_a_figure_lies():
    plan = {"bytes": 2.0, "least": 2.5, "most": 4.0}
    assert [beside.verdict(ms, plan) for ms in (2.2, 2.5, 4.0, 6.0)] == [
        "faster than the bound", "within the range", "within the range", "1.5 times the longest",
    ]  # fmt: skip


def test_the_page_has_the_table_of_the_files():
    assert beside.MARKED.findall(beside.PAGE.read_text()) == [
        f"<!-- published -->\n{beside.table(ROWS, PLANS)}\n<!-- end -->"
    ]
    assert set(PLANS) == {beside.command(row) for row in ROWS}


@pytest.mark.slow
@pytest.mark.covers("plan")
def test_a_plan_is_what_the_command_says():
    row = ROWS[2]  # one chip, so one program for each depth
    skip_without_compiler(row["topology"])
    with jax.default_matmul_precision("default"):  # as users compile it
        found = beside.planned(row)
    assert found == pytest.approx(PLANS[beside.command(row)], rel=0.02)
