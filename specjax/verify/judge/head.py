"""The head of judge decoding (Bachmann et al. 2025, arXiv:2501.19309)."""

from typing import Any

import jax
import jax.numpy as jnp


def score(params: Any, features: jax.Array) -> jax.Array:
    """The head's logits `[...]` in float32 that tokens are right, from the target's features `[..., E]` at them."""
    kernel, bias = (params[name].astype(jnp.float32) for name in ("kernel", "bias"))
    return features.astype(jnp.float32) @ kernel + bias[0]
