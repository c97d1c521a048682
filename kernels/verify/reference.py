"""The slow, obvious implementation: `jax.random.gumbel` for every node, then an argmax."""

import jax
import jax.numpy as jnp


def argmax(scores, keys, which, noisy, columns=None):
    """See `api.gumbel_argmax`. Makes `[B, N, V]` of noise.

    Args:
      scores: `[B, N, V]` float32.
      keys: `[B, C]` typed keys.
      which: `[B, N]` int32.
      noisy: `[B]` bool.
      columns: `[V]` int32, or None.
    """
    vocab = scores.shape[-1] if columns is None else int(columns.max()) + 1
    own = jax.vmap(lambda keys, which: keys[which])(keys, which)
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32)))(own)
    noise = noise if columns is None else noise[:, :, columns]
    total = jnp.where(noisy[:, None, None], scores + noise, scores)
    total = jnp.where(jnp.isnan(total), jnp.inf, total)
    peak = total.max(axis=-1)
    return jnp.where(jnp.isfinite(peak), jnp.argmax(total, axis=-1), -1).astype(jnp.int32), peak
