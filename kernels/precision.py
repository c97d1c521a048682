"""The requested precision of products."""

import jax

_USUAL = (None, "default", "fastest", "bfloat16")  # names of the precision of a single matrix-unit product


def setting(name: str = "jax_default_matmul_precision") -> str | None:
    """The value of a JAX setting; by default, that of `jax.default_matmul_precision`."""
    return getattr(jax.config, name)


def is_usual() -> bool:
    """Whether a matrix unit's default precision is enough."""
    return setting() in _USUAL
