"""The examples in docstrings print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
from support.conformance import but_slow

PACKAGE = Path(__file__).parents[1] / "specjax"
FILES = (path for part in (PACKAGE, *PACKAGE.iterdir()) if part.is_dir() for path in part.rglob("*.py"))
MODULES = sorted(
    {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES if ">>> " in path.read_text()}
)


SLOW = ("specjax.jobs.batches", "specjax.serve.engine", "specjax.serve.score")  # these compile the shipped target


@pytest.mark.parametrize("name", but_slow(MODULES, *SLOW))
def test_examples(name):
    module = importlib.import_module(name)
    ran = doctest.testmod(module)
    assert ran.attempted > 0 and ran.failed == 0
