"""The gated delta rule by XLA, on every platform."""

import jax
import jax.numpy as jnp

from specjax.kernels.path_decays import decays
from specjax.kernels.precision import full_einsum

Array = jax.Array


def attend(query, key, value, strength, log_decay, known, seen, sums) -> Array:
    """See `api.operands`; returns `[2, B, N, R, A, V]`, outputs and corrections."""
    kept, left = decays(jnp.moveaxis(log_decay[..., 0, :], 3, 1), seen > 0)  # [B, A, N, R], [B, A, A, N, R]
    kept, left = jnp.moveaxis(kept, 1, 3)[..., None], jnp.moveaxis(left, (1, 2), (3, 4))
    strength = strength[..., 0, :, None]
    both = jnp.concatenate([query, key], axis=2)
    likeness = full_einsum("bnik,bnjk->bnij", both, key)[:, :, None]
    of_state = full_einsum("bnik,bnrkv->bnriv", both, sums)
    of_query, of_key = jnp.split(of_state, 2, axis=3)
    by_query, by_key = jnp.split(likeness, 2, axis=3)
    wanted = strength * (value - kept * of_key) + known
    made = wanted
    if wanted.shape[3] > 1:
        below = strength * left * by_key  # the solver reads only what is below the diagonal
        made = jax.lax.linalg.triangular_solve(below, wanted, left_side=True, lower=True, unit_diagonal=True)
    return jnp.stack([kept * of_query + full_einsum("bnrij,bnrjv->bnriv", left * by_query, made), made])
