"""What tests cost in processor seconds: measured as they run, and declared in `costs.json`, which a test adds up.

`costs.json` has the seconds of every file, of its fast tests and of its slow ones, and of every method and family those of the
tests that are there for it: the file that is called after it, and its lines in the tables that all methods are in.
"""

import collections
import json
import re
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from support.turns import name_of

FILE = Path(__file__).parents[1] / "costs.json"
TABLES = ("tests/guarantees/", "tests/test_conformance.py", "tests/models/test_families", "tests/models/test_greedy")
"""Files whose first parameter says which method or family a test is for."""


def seconds_so_far() -> float:
    """Processor seconds of this process, all threads together, and of the processes that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cost_of(stats: Mapping[str, Iterable[Any]]) -> dict[str, float]:
    """Processor seconds by test, its fixtures' among them, of pytest's reports."""
    reports = [report for reports in stats.values() for report in reports if getattr(report, "when", "") == "teardown"]
    return {report.nodeid: dict(report.user_properties).get("cpu", 0.0) for report in reports}


def owner(test: str, names: Iterable[str]) -> str | None:
    """The method or family that a test is there for; None where it is for several or for none.

    >>> owner("tests/draft/test_mtp.py::test_a", ["mtp"]), owner("tests/test_conformance.py::test_b[mtp-top_k]", ["mtp"])
    ('mtp', 'mtp')
    """
    file, _, function = test.partition("::")
    own = name_of(file)
    if not file.startswith(TABLES):
        return own if own in names else None
    first = re.split(r"[-@:\]]", function.partition("[")[2])[0]
    return first if first in names else None


def declared() -> dict[str, dict[str, list[float]]]:
    """What `costs.json` says."""
    return json.loads(FILE.read_text())


def write_costs(stats: Mapping[str, Iterable[Any]]) -> None:
    """Declares what the tests of this run cost, in the place of what was declared of the same files and sets."""
    from support.methods import FAMILIES, METHODS

    slow = {r.nodeid for reports in stats.values() for r in reports if "slow" in getattr(r, "keywords", ())}
    known = declared() if FILE.exists() else {"files": {}, "methods": {}}
    found: dict[str, dict[str, dict[int, float]]] = {"files": {}, "methods": {}}
    for test, seconds in cost_of(stats).items():
        whose = {"files": test.partition("::")[0], "methods": owner(test, METHODS | FAMILIES)}
        for kind, name in whose.items():
            if name is not None:
                own = found[kind].setdefault(name, collections.defaultdict(float))
                own[test in slow] += seconds
    for kind, entries in found.items():
        for name, own in entries.items():
            old = known[kind].get(name, [0.0, 0.0])
            known[kind][name] = [round(own.get(i, old[i]), 1) for i in (0, 1)]
        known[kind] = dict(sorted(known[kind].items()))
    tables = [f' "{kind}": {{\n{_lines(entries)}\n }}' for kind, entries in known.items()]
    FILE.write_text("{\n" + ",\n".join(tables) + "\n}\n")


def _lines(entries: Mapping[str, Any]) -> str:
    """An entry per line, so that a change of one is seen as such."""
    return ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items())
