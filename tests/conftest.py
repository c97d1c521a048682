"""Strict flags for every test: eight CPU devices, no silent rank promotion, float32 products in full precision."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
    """Hundreds of compiled programs in one process exhaust its memory maps, and XLA aborts."""
    yield
    jax.clear_caches()
