"""The tables of the pages are those that the registry would write now."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(tables):
    pages = {page.name: page.read_text() for page in DOCS.glob("*.md")}
    assert {name for name, page in pages.items() if tables.filled(page) != page} == set(), "run python docs/tables.py"


def test_the_flags_are_those_of_the_commands(tables):
    assert tables.FLAGS.read_text() == tables.flags(), "run python docs/tables.py"


def test_every_table_has_its_page_and_every_method_its_row(tables):
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name, rows in tables.TABLES.items():
        assert text.count(f"<!-- table: {name} -->") == 1, name
        cells = [row[0] for row in rows()][1:]
        assert cells and all(text.count(f"| {cell} |") >= 1 for cell in cells)


def test_a_stale_table_is_written_again(tables):
    page = "before\n<!-- table: verifiers -->\n\n| old |\n\n<!-- end -->\nafter\n"
    assert tables.filled(page).startswith("before\n<!-- table: verifiers -->\n\n| name | keeps | text | source |")
    assert "| old |" not in tables.filled(page) and tables.filled(page).endswith("<!-- end -->\nafter\n")
