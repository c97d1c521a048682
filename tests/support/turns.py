"""Which slow tests a run of the CI has: those of what changed, the eighth of the day, and those that failed not long ago.

- Names are compared, not imports, which lead from everything to everything. A test has the names that it `covers`, that of
  its file, and those of its parameters. It is run where a file of such a name (a method's, a family's, a page's, a command's)
  changed in the last commits. After changes of nearly everything these are too many: then a share of them waits for the days
  to come, and what comes next is run first.
- The day chooses an eighth of all functions, the same all day long, so that a second run meets the same tests.
- `.ci/red` lists the slow tests that failed, each with how many good runs it must still see.
"""

import functools
import hashlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RED = ROOT / ".ci" / "red"
COMMITS, HOURS = 40, 24
"""How far back a change counts, whichever reaches further."""
MANY = 200
"""Tests of what changed that a run has, about."""
TURNS = 8
GOOD_RUNS = 5
"""That a test must see after it failed."""
FOLDERS = ("specjax", "models", "kernels", "sharding", "docs", "experiments")
"""Whose files give names."""
METHODS_IN_FOLDERS = ("draft", "unmask")
"""Folders in which a method may be a folder of its own."""
GENERAL = {
    "",
    "api",
    "base",
    "changes",
    "command",
    "options",
    "readme",
    "report",
    "results",
    "run",
    "table",
    "test",
    "tests",
}
"""Names of so many things that they say nothing."""


def day() -> int:
    """Days since 1970, when this run began: workers have it of the process that started them."""
    return int(os.environ.setdefault("SPECJAX_TESTS_DAY", str(int(time.time() // 86400))))


def name_of(path: str) -> str:
    """What a file is about: its stem, or its folder's name, as of a method that has a folder; of a test's file without `test_`.

    >>> [name_of(path) for path in ("tests/draft/test_del.py", "specjax/draft/del_.py", "experiments/chip/README.md")]
    ['del', 'del', 'chip']
    >>> name_of("specjax/draft/eagle3/objective.py")
    'eagle3'
    """
    own = Path(path)
    if own.parent.parent.name in METHODS_IN_FOLDERS:
        return own.parent.name
    stem = own.parent.name if own.stem.lower() in ("readme", "__init__", "__main__") else own.stem
    return stem.lower().removeprefix("test_").strip("_")


def names_of(files: Iterable[str]) -> frozenset[str]:
    """What changed files are about, those of the tests left out."""
    return frozenset({name_of(file) for file in files if file.split("/")[0] in (*FOLDERS, "README.md")} - GENERAL)


@functools.cache
def changed() -> frozenset[str] | None:
    """The names of the last commits and of the working tree; None where there is no history to tell."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    known = git("rev-list", "--count", "HEAD")
    if known.returncode or int(known.stdout) <= COMMITS:
        return None
    told = "log", "--name-only", "--format="
    found = [git(*told, f"-{COMMITS}"), git(*told, f"--since={HOURS} hours ago"), git("diff", "--name-only", "HEAD")]
    if any(one.returncode for one in found):
        return None
    return names_of(line for one in found for line in one.stdout.splitlines())


def of_the_day(function: str, today: int) -> bool:
    """Whether a function's turn is today, by the hash of its id."""
    return int.from_bytes(hashlib.blake2b(function.encode(), digest_size=8).digest()) % TURNS == today % TURNS


def red() -> dict[str, int]:
    """Tests that failed, and how many good runs each must still see."""
    lines = [line for line in (RED.read_text().splitlines() if RED.exists() else []) if line and line[0] != "#"]
    return {name: int(count) for count, _, name in (line.partition(" ") for line in lines)}


def after(known: Mapping[str, int], failed: Iterable[str], passed: Iterable[str]) -> dict[str, int]:
    """What `red` is after a run.

    >>> after({"a": 1, "b": 2, "c": 3}, failed=["d", "c"], passed=["a", "b"])
    {'b': 1, 'c': 5, 'd': 5}
    """
    passed = set(passed)
    left = {name: count - (name in passed) for name, count in known.items()}
    return dict(sorted(({name: n for name, n in left.items() if n} | dict.fromkeys(failed, GOOD_RUNS)).items()))


def write_red(tests: Mapping[str, int]) -> None:
    """Replaces the list."""
    head = "# slow tests that failed, and how many good runs each must still see\n"
    RED.write_text(head + "".join(f"{count} {name}\n" for name, count in tests.items()))


def covered(item: Any) -> set[str]:
    """The names that a test covers: those that it says, its file's, and its parameters'."""
    file, _, function = item.nodeid.partition("::")
    said = {str(name).lower() for mark in item.iter_markers("covers") for name in mark.args}
    return (said | {name_of(file)} | set(re.split(r"[^a-z0-9_]+", function.partition("[")[2].lower()))) - GENERAL


def days_ahead(count: int) -> int:
    """For how many turns, today's first, tests of what changed are run when there are so many of them.

    >>> [days_ahead(count) for count in (10, 200, 430, 5000)]
    [8, 8, 3, 1]
    """
    return TURNS if count <= MANY else max(1, TURNS * MANY // count)


def why(
    item: Any, names: frozenset[str] | None, today: int, failed: Mapping[str, int], ahead: int = TURNS
) -> str | None:
    """Why a slow test is run today; None where it is not.

    Args:
      item: of pytest.
      names: see `changed`.
      today: see `day`.
      failed: see `red`.
      ahead: see `days_ahead`.
    """
    if names is None:
        return "there is no history"
    if item.nodeid in failed:
        return "failed not long ago"
    function = item.nodeid.partition("[")[0]
    if covered(item) & names and any(of_the_day(item.nodeid, today + days) for days in range(ahead)):
        return "changed"
    return "of the day" if of_the_day(function, today) else None
