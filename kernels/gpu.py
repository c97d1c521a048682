"""The kernels that an NVIDIA GPU has: Triton under Pallas, which JAX calls deprecated from 0.11 on, may be gone one
day."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether this version of JAX lowers Pallas to Triton. Where it does not, products are XLA's, and so is tree attention
    that the kernel for Hopper does not take."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
