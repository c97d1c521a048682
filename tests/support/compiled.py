"""How tests compile: in a hurry (`tests/conftest.py` sets XLA_FLAGS before jax is imported), or as users do."""

import importlib.metadata
import runpy
from pathlib import Path

OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_enable_concurrency_optimized_scheduler": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""XLA's own defaults, whatever XLA_FLAGS says."""

HURRIED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_enable_concurrency_optimized_scheduler": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""A decoder's step compiles in a third of the time."""

# most of that time is LLVM over the loops of the newer fusion emitters; later XLA has no others, and ends the process at a
# flag that it does not know
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    OPTIMISED["xla_cpu_use_fusion_emitters"] = True
    HURRIED["xla_cpu_use_fusion_emitters"] = False


def programs_folder() -> str:
    """Where compiled programs are kept, for other clones and later runs too; found without importing jax."""
    own = runpy.run_path(str(Path(__file__).parents[2] / "specjax" / "programs.py"))
    return str(own["folder"](own["caches"]() / "specjax-tests"))


def hurried_flags() -> str:
    """The value of XLA_FLAGS under which every program is compiled in a hurry."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in HURRIED.items())


def optimised(lowered):
    """Compiles what `jax.jit(...).lower(...)` returned as users do: three to four times as long."""
    return lowered.compile(OPTIMISED)
