"""The kernels of NVIDIA GPUs. Triton under Pallas is deprecated since JAX 0.11 and may be removed one day."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether this version of JAX lowers Pallas to Triton.

    If not, XLA computes products, and tree attention that the kernel for Hopper does not take."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
