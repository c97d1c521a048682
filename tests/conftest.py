"""Strict flags for every test: eight CPU devices, no silent rank promotion, float32 products in full precision.

Nearly all of a test's time is compilation, so programs are compiled with little optimization and kept between runs.
"""

import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


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
