"""The page of pictures shows what its command makes."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from specjax.viz import text

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pictures.md").read_text()


@pytest.fixture(scope="module")
def pictures():
    """The command, which is in no package."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("pictures")
    finally:
        sys.path.remove(str(DOCS))


def test_every_picture_is_there_and_small():
    shown = re.findall(r"\]\(pictures/(\w+)\.png\)\n\n```text\n(.+?)```", PAGE, re.DOTALL)
    files = {file.stem: file.stat().st_size for file in (DOCS / "pictures").iterdir()}
    assert {name for name, _ in shown} == set(files) and len(shown) == 7
    assert max(files.values()) < 60_000 and all(words.strip() for _, words in shown)


def test_text_of_committed_figures_is_up_to_date(pictures):
    bench, times = pictures.bench(), pictures.times()
    assert len(bench["rows"]) > 3
    for name, words in (
        ("acceptance", text.acceptance(bench)),
        ("speedup", text.speedup(bench)),
        ("step_times", text.step_times(times)),
    ):
        assert pictures.filled(PAGE, name, words) == PAGE


def test_a_picture_that_the_page_does_not_show(pictures):
    changed = pictures.filled(PAGE, "speedup", "other \\1")
    assert changed != PAGE and "```text\nother \\1\n```" in changed
    with pytest.raises(ValueError, match="pictures.md shows pictures/pie.png"):
        pictures.filled(PAGE, "pie", "")
