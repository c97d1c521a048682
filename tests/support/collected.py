"""Whether tests that are named elsewhere are there, and in the fast set."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def not_in_the_fast_set(session, asked: Iterable[str]) -> list[str]:
    """Which of these tests `pytest` alone would not run; `FILE::NAME` stands for all cases of a test.

    What this session has collected is looked at first, which is everything where all tests run.
    """
    here = [item.nodeid for item in session.items if item.get_closest_marker("slow") is None]
    left = set(_without(here, set(asked)))
    if not left:
        return []
    words = ["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = sorted({test.partition("::")[0] for test in left if (ROOT / test.partition("::")[0]).exists()})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files], cwd=ROOT, env=own, capture_output=True, text=True
    )
    return _without(done.stdout.splitlines(), left)


def _without(ids: Iterable[str], asked: set[str]) -> list[str]:
    ids = list(ids)
    there = {*ids, *(test.partition("[")[0] for test in ids)}
    return sorted(test for test in asked if test not in there)
