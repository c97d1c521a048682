"""The tables of the pages are those that the registry would write now."""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import specjax
from specjax.assembly import registry

DOCS = Path(__file__).parents[2] / "docs"
HOMES = {
    "DRAFTERS": "drafters", "EXPANDERS": "drafters", "RULES": "drafters", "VERIFIERS": "verifiers", "SEARCHES": "searches",
    "STEPWISE": "searches", "SELECTIONS": "searches", "MIXERS": "samplers", "OLDS": "memory", "UNMASKS": "diffusion",
    "SAMPLERS": "diffusion", "CACHES": "diffusion",
}  # fmt: skip
"""The page of every registry but that of the warpers."""
KNOWN = {
    "draft": "drafts", "diffusion_draft": "drafts", "gad": "drafts", "swift": "self_speculation",
    "kangaroo": "self_speculation", "prompt_lookup": "retrieval", "rest": "retrieval", "lookahead": "jacobi",
    "medusa": "heads", "mtp": "heads",
    "opt_tree": "trees", "typical": "verification", "beam": "searches", "majority": "choosing", "prophet": "early_commit",
    "free_dave": "verified", "redo": "edits", "dual": "caching", "threshold": "masked",
}  # fmt: skip
"""The classes of some methods, by their papers."""


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # the folder is no package
        return importlib.import_module("tables")


def test_pages_are_up_to_date(tables):
    pages = {page.name: page.read_text() for page in tables.PAGES}
    assert {name for name, page in pages.items() if tables.filled(page) != page} == set(), "run python docs/tables.py"


@pytest.mark.parametrize("name", ("flags", "sampling_fields"))
def test_written_modules_are_up_to_date(tables, name):
    written = Path(specjax.__file__).parent / f"{name}.py"
    assert getattr(tables, name)() == written.read_text(), "run python docs/tables.py"


def test_every_table_has_its_page_and_every_method_its_row(tables):
    text = "".join(page.read_text() for page in tables.PAGES)
    for name, rows in tables.TABLES.items():
        assert text.count(f"<!-- table: {name} -->") == 1, name
        cells = [row[0] for row in rows()][1:]
        assert cells and all(text.count(f"| {cell} |") >= 1 for cell in cells)


def test_the_survey_has_every_method_once(tables):
    """In one class each, and classes that a table of exceptions names hold what it says."""
    found = Counter((name, page) for kind in {*tables.SURVEY} for name, page in _linked(tables.survey(kind)))
    there = Counter(
        (name, page)
        for table, page in HOMES.items()
        for name in getattr(registry, table)
        if (table, name) != ("DRAFTERS", "none")
    )
    assert found == there + Counter([("assd", "diffusion"), ("context_ngram", "diffusion")])
    classes = {name: kind for kind in tables.SURVEY for name, _ in _linked(tables.survey(kind))}
    assert {name: classes[name] for name in KNOWN} == KNOWN


def _linked(rows):
    """Names and pages of a table of the survey."""
    return [re.fullmatch(r"\[`(\w+)`\]\((\w+)\.md\)", row[0]).groups() for row in list(rows)[1:]]


def test_a_stale_table_is_written_again(tables):
    page = "before\n<!-- table: verifiers -->\n\n| old |\n\n<!-- end -->\nafter\n"
    assert tables.filled(page).startswith("before\n<!-- table: verifiers -->\n\n| name | keeps | text | source |")
    assert "| old |" not in tables.filled(page) and tables.filled(page).endswith("<!-- end -->\nafter\n")
