"""Which tokens of a row are masked in training: what decoding meets, in the proportions that `config.toml` gives."""

import jax
import jax.numpy as jnp

Array = jax.Array


def corrupt(key: Array, rows: int, length: int, masking: dict) -> tuple[Array, Array]:
    """Positions that are masked `[R, T]`, and those of them that are learned `[R, T]`; never position 0, never none.

    A row is one of three kinds. In `uniform` rows every position is masked alike (LLaDA's training, up to the rate `most`); in
    `infill` rows a span between known tokens; the others know their beginning only, and learn a block as semi-autoregressive
    decoding meets it.
    """
    kind_key, rate_key, span_key, start_key, mask_key, one_key = jax.random.split(key, 6)
    draw = jax.random.uniform(kind_key, (rows,))
    uniform = draw < masking["uniform"]
    infill = ~uniform & (draw < masking["uniform"] + masking["infill"])
    # rates spread evenly over the batch: a steadier loss than independent ones
    rate = (jnp.arange(rows) + jax.random.uniform(rate_key, (rows,))) / rows
    rate = jax.random.permutation(rate_key, rate) * jnp.where(uniform, masking["most"], 1.0)
    span = jax.random.randint(span_key, (rows,), 1, masking["span"] + 1)
    span = jnp.where(uniform, length - 1, jnp.where(infill, span, masking["block"]))
    start = jnp.floor(jax.random.uniform(start_key, (rows,)) * (length - span)).astype(jnp.int32) + 1
    at = jnp.arange(length)[None]
    inside = (at >= start[:, None]) & (at < (start + span)[:, None])
    chosen = inside & (jax.random.uniform(mask_key, (rows, length)) < rate[:, None])
    forced = start + jnp.floor(jax.random.uniform(one_key, (rows,)) * span).astype(jnp.int32)
    chosen = jnp.where(chosen.any(axis=1, keepdims=True), chosen, at == forced[:, None])
    unknown = ~uniform & ~infill
    return chosen | (unknown[:, None] & (at >= (start + span)[:, None])), chosen
