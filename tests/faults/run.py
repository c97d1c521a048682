"""Runs the tests of a fault while it is planted."""

import os
import subprocess
import sys
from pathlib import Path

from tests.faults.plugin import VARIABLE
from tests.faults.table import FAULTS, Gone, planted

ROOT = Path(__file__).parents[2]


def caught_by(name: str) -> list[str]:
    """The ids of the tests that fail while a fault is planted, up to the first; none: it is not caught.

    Raises:
      Gone: where it cannot be planted, or its tests cannot run.
    """
    fault = FAULTS[name]
    planted(fault, (ROOT / fault.file).read_text())
    words = ["-q", "-x", "-n", "0", "-m", "not slow", "-rfE", "--tb=no", "-p", "no:cacheprovider", *fault.tests]
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {VARIABLE: name}
    command = [sys.executable, "-m", "pytest", "-p", "tests.faults.plugin", *words]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise Gone(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    return [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and line[1].startswith("tests/")]
