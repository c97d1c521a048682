"""The choice of tokens on which to train a small draft (AdaSPEC, arXiv:2510.19779)."""

import jax
import jax.numpy as jnp

from specjax.objectives.losses import ForwardKL
from specjax.objectives.means import MEAN, Mean

Array = jax.Array


def select(
    target_logits: Array, draft_logits: Array, reference_logits: Array, mask: Array, keep: float, mean: Mean = MEAN
) -> Array:
    """The masked tokens with the most room to improve: those with the largest `KL(p, q_draft) - KL(p, q_reference)`.

    The reference is an earlier draft, distilled from the same start; tokens that it could not learn are left out.

    Args:
      target_logits: `[B, T, V]`.
      draft_logits: `[B, T, V]`.
      reference_logits: `[B, T, V]`.
      mask: `[B, T]` bool.
      keep: the share of masked tokens to keep, to the nearest token; equal differences are kept together. 1 keeps all.
      mean: gives access to the tokens of the whole batch, among which they are chosen.

    Returns:
      `[B, T]` bool, without a gradient.
    """
    kl = ForwardKL().positions
    room = kl(target_logits, draft_logits) - kl(target_logits, reference_logits)
    room = jnp.where(mask, jax.lax.stop_gradient(room), -jnp.inf)
    ranked = jnp.sort(mean.every(room), descending=True)
    count = jnp.maximum(jnp.round(keep * (ranked > -jnp.inf).sum()).astype(jnp.int32), 1)
    return mask & (room >= ranked[count - 1])
