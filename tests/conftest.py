"""Strict flags for every test: eight CPU devices, no silent rank promotion, float32 products in full precision.

Nearly all of a test's time is compilation, so programs are compiled with little optimization and kept between runs.
`support.compiled.optimised` compiles one as users do.
"""

import collections
import ctypes
import gc
import os
import sys
from pathlib import Path

from support.compiled import hurried_flags, programs_folder
from support.costs import cost_of, seconds_so_far, write_costs
from support.turns import TURNS, after, changed, day, days_ahead, red, why, write_red

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads of several workers would wait for each other, busily
os.environ.setdefault("XLA_FLAGS", hurried_flags())
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs_folder())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # commands that a test starts do not look for chips either

import jax
import pytest

day()  # the same for all processes of this run
gc.set_threshold(20_000, 20, 20)  # tracing makes many objects and hardly any garbage

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# of every program: thousands of them are an operation or two, and loading one takes half the time of compiling it. Two commands
# that run beside each other, which start from the environment, would meet at the small ones while they are written
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def memory_maps() -> int:
    """How many memory maps this process has; 0 where the system does not say."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    with maps.open() as lines:
        return sum(1 for _ in lines)


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """Every file starts without compiled programs, so what one test traces does not depend on another file.

    The C library keeps what they took unless it is asked to hand it back: the slow set took 8 GB in each of two workers.
    """
    yield
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Thousands of compiled programs in one process exhaust its memory maps (65,530 on Linux), and XLA aborts."""
    yield
    if memory_maps() > 30_000:
        jax.clear_caches()


LONG = (
    "test_conformance.py",
    "test_greedy_vs_transformers.py",
    "test_processes.py",
    "test_shipped.py",
    "test_every_drafter_1.py",
    "test_every_drafter_2.py",
    "test_beam.py",
    "test_rings.py",
    "test_traces.py",
    "test_plan_llama.py",
    "test_plan.py",
    "test_blocks.py",
)
"""Files that take minutes come first: else one worker begins the last of them when the other ends."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Every test's processor seconds, with those of its fixtures."""
    began = seconds_so_far()
    item.user_properties.append(("began", began))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        began = dict(item.user_properties)["began"]
        report.user_properties = [("cpu", seconds_so_far() - began)]
    return report


def pytest_addoption(parser):
    group = parser.getgroup("specjax")
    group.addoption(
        "--turn",
        choices=("due", "whole"),
        help="of the slow tests those that are due today, or all; keeps the list .ci/red",
    )
    group.addoption(
        "--write-costs", action="store_true", help="write what the tests of this run cost to tests/costs.json"
    )


def pytest_configure(config):
    if config.getoption("--turn"):
        config.pluginmanager.register(Turn(config), "turn")


def pytest_collection_modifyitems(items):
    for item in items:
        if "compile" in item.path.parts:
            item.add_marker(pytest.mark.slow)  # what only the extra `aot` can run
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


class Turn:
    """Chooses among slow tests, and says how many it left out; see `support.turns`."""

    def __init__(self, config):
        self.config, self.counts = config, collections.Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        names, failed, left = changed(), red(), []
        slow = {item for item in items if item.get_closest_marker("slow")}
        ahead = days_ahead(sum(why(item, names, day(), failed) == "changed" for item in slow))
        for item in items:
            reason = None
            if item in slow:
                whole = config.getoption("--turn") == "whole"
                reason = "all of them" if whole else why(item, names, day(), failed, ahead)
                self.counts[reason or "left out"] += 1
                left += [] if reason else [item]
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["turn"] = dict(self.counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.counts = collections.Counter(getattr(node, "workeroutput", {}).get("turn", self.counts))

    def pytest_terminal_summary(self, terminalreporter):
        stats = terminalreporter.stats
        failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
        passed = {report.nodeid for report in stats.get("passed", ()) if report.when == "call"}
        slow = {
            report.nodeid
            for reports in stats.values()
            for report in reports
            if "slow" in getattr(report, "keywords", ())
        }
        known = red()
        now = after(known, failed & slow, passed - failed)
        if now != known:
            write_red(now)
            terminalreporter.write_line(".ci/red has changed: commit it")
        if self.counts:
            said = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))
            terminalreporter.write_line(f"slow tests, day {day() % TURNS + 1} of {TURNS}: {said}")


def pytest_terminal_summary(terminalreporter, config):
    """What tests cost; `CONTRIBUTING.md` says what a method may."""
    spent = cost_of(terminalreporter.stats)
    terminalreporter.section("processor seconds by file")
    by_file = collections.Counter()
    for name, seconds in spent.items():
        by_file[name.partition("::")[0]] += seconds
    for name, seconds in by_file.most_common(12):
        terminalreporter.write_line(f"{seconds:8.1f} {name}")
    terminalreporter.write_line(f"{sum(spent.values()):8.1f} in all, {len(spent)} tests of {len(by_file)} files")
    if config.getoption("--write-costs"):
        write_costs(terminalreporter.stats)
