"""The precision that products are asked for."""

import jax

_USUAL = (None, "default", "fastest", "bfloat16")  # names of what a matrix unit does with one product


def setting(name: str = "jax_default_matmul_precision") -> str | None:
    """As `jax.default_matmul_precision` sets it."""
    return getattr(jax.config, name)


def is_usual() -> bool:
    """Whether a matrix unit's usual precision is enough."""
    return setting() in _USUAL
