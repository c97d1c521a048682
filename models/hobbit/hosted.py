"""Parameters in the memory of the host, from which a device reads by itself."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.errors import ModelError

KIND = "pinned_host"
"""JAX's name of such memory."""


def check() -> None:
    """Checks that the default device has such memory.

    Raises:
      ModelError: if it has none.
    """
    (device,) = jax.device_put(0).devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if KIND not in kinds:
        raise ModelError(
            f"{device.device_kind} reads no memory of its host ({KIND}; it has {', '.join(sorted(kinds))}): leave host=true out"
        )


def moved(tree: Any) -> Any:
    """Arrays moved to their devices' hosts, one at a time."""
    there = lambda x: jax.device_put(x, x.sharding.with_memory_kind(KIND))
    return jax.tree.map(lambda x: jax.block_until_ready(there(jnp.asarray(x))), tree)
