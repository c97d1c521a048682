"""The site builds without a warning. Its notebooks are not executed here: `tests/docs/test_notebooks.py` does that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {page.stem for page in (ROOT / "docs").rglob("*.md")} | {"conf", "site"}


@pytest.mark.slow
@pytest.mark.covers(*sorted(NAMES))
def test_the_site_builds_without_a_warning(tmp_path):
    for name in ("sphinx", "myst_nb", "sphinx_book_theme"):
        pytest.importorskip(name, reason="needs the extra docs")
    # a notebook says its language as it is executed
    settings = "-Dnb_execution_mode=off", "-Dsuppress_warnings=myst-nb.lexer"
    words = "-m", "sphinx", "-q", "-W", "--keep-going", *settings, "docs", str(tmp_path)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<h1>Quick start" in (tmp_path / "notebooks" / "quick_start.html").read_text()
