"""Oracle for slots that begin at inner layers: one line of text, layer by layer, with each slot put in where it begins."""

import jax
import jax.numpy as jnp

from specjax.lm import Block


def after(lm, layers, weights, maps, tokens, length):
    """What the pseudo slots of a text's last token say, `[m, E]` after the final norm.

    Args:
      lm: the target.
      layers: for each map the layer that its slot enters.
      weights: the target's parameters.
      maps: the drafter's, a list of {`kernel` `[E, E]`}.
      tokens: `[S]`, the text and padding.
      length: of the text.
    """
    tokens, count = jnp.asarray(tokens, jnp.int32), len(layers)
    size = len(tokens)
    slots, step = jnp.arange(size), jnp.arange(count)
    text = jnp.concatenate([slots[None] <= slots[:, None], jnp.zeros((size, count), bool)], axis=1)
    own = jnp.concatenate([jnp.broadcast_to(slots[None] < length, (count, size)), step[None] <= step[:, None]], axis=1)
    block = Block(
        jnp.concatenate([tokens, jnp.zeros(count, jnp.int32)])[None],
        jnp.concatenate([slots, length + step])[None],
        jnp.zeros(1, jnp.int32),
        jnp.concatenate([text, own])[None],
    )
    h = lm.embed(weights, block.tokens)
    for layer in range(lm.num_layers):
        last = jax.lax.dynamic_index_in_dim(h[0], length - 1, keepdims=False)
        for number, begins in enumerate(layers):
            if begins == layer:
                h = h.at[0, size + number].set(last @ maps[number]["kernel"])
        h, _ = lm.layers(weights, h, layer, layer + 1, block, None)
    return lm.norm(weights, h)[0, size:]
