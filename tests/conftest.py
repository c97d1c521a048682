"""Strict flags for every test: eight CPU devices, no silent rank promotion, float32 products in full precision.

Nearly all of a test's time is compilation, so programs are compiled with little optimization and kept between runs.
`support.compiled.optimised` compiles one as users do.
"""

import collections
import gc
import os
from pathlib import Path

from support.compiled import hurried_flags

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads of several workers would wait for each other, busily
os.environ.setdefault("XLA_FLAGS", hurried_flags())
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

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
    """Every file starts without compiled programs, so what one test traces does not depend on another file."""
    yield
    jax.clear_caches()


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
)
"""Files that take minutes come first: else one worker begins the last of them when the other ends."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_terminal_summary(terminalreporter):
    """The slowest files; `CONTRIBUTING.md` says what a method may cost."""
    seconds = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("seconds by file")
    for name, spent in seconds.most_common(12):
        terminalreporter.write_line(f"{spent:8.1f} {name}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f} all {len(seconds)} files")
