"""Strict flags for every test: eight CPU devices, no silent rank promotion, float32 products in full precision."""

import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Compiled programs are kept between runs; one folder a worker, so that two never write the same file.
_worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache" / _worker))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
