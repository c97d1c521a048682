"""The site builds without a warning, and says what the README does. `tests/docs/test_notebooks.py` executes its notebooks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import decode, search

ROOT = Path(__file__).parents[2]
NAMES = {page.stem for page in (ROOT / "docs").rglob("*.md")} | {"conf", "site"}


@pytest.mark.slow
@pytest.mark.covers(*sorted(NAMES))
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_design"):
        pytest.importorskip(name, reason="needs the extra docs")
    # a notebook says its language as it is executed
    settings = "-Dnb_execution_mode=off", "-Dsuppress_warnings=myst-nb.lexer"
    words = "-m", "sphinx", "-q", "-W", "--keep-going", *settings, "docs", str(tmp_path)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<h1>Quick start" in (tmp_path / "notebooks" / "quick_start.html").read_text()
    assert "<h1>Searches" in (tmp_path / "searches.html").read_text()


def test_no_page_is_called_as_one_that_sphinx_writes():
    own = {"search", "genindex", "py-modindex"}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} & own == set()


def test_the_first_page_begins_as_the_readme():
    """How it is installed, and where it has run."""
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/index.md")]
    first, second = ("```".join(page.split("```")[:2]) for page in pages)
    assert first == second and "pip install -e . &&" in first and "So far it has been run on" in first


def test_a_search_is_documented_once():
    """`specjax.decode` names the searches too, and its page leaves to theirs what both have."""
    page = (ROOT / "docs/api/generate.md").read_text()
    named = page.split(":exclude-members:")[1].splitlines()[0].split(",")
    both = {name for name in set(dir(decode)) & set(dir(search)) if not name.startswith("_")}
    assert {name.strip() for name in named} == both
