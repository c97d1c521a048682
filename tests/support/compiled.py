"""Programs as users compile them; every other program of the tests is compiled in a hurry (`tests/conftest.py`)."""

OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_enable_concurrency_optimized_scheduler": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""XLA's own defaults, whatever XLA_FLAGS says."""


def optimised(lowered):
    """Compiles what `jax.jit(...).lower(...)` returned as users do: three to four times as long."""
    return lowered.compile(OPTIMISED)
