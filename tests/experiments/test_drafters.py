"""The page on drafters says what its reports do."""

from experiments.drafters.report import HERE, MARKED, written


def test_the_page_says_what_the_reports_do():
    page = (HERE / "README.md").read_text()
    assert written(page) == page, "run experiments/drafters/report.py"
    assert {"greedy", "sampled", "wide", "wide_greedy", "wide_sampled"} <= {*MARKED.findall(page)}
