"""Log-probabilities of given texts, to be differentiated: what a policy's loss is made of.

In the shape descriptions `R` denotes rows, `L` tokens, `C` columns of a chunk, `V` the vocabulary.
"""

from typing import Any

import jax.numpy as jnp

from specjax.arrays import Array, Float, Int
from specjax.kernels.chunks import chunked
from specjax.lm import LM, Block, Wants
from specjax.objectives.losses import surprise
from specjax.settings import settled

PyTree = Any


@settled
def token_logprobs(
    lm: LM,
    params: PyTree,
    tokens: Int[Array, "R L"],
    *,
    temperature: Float[Array, " R"] | float = 1.0,
    chunk: int = 64,
) -> Float[Array, "R L"]:
    """The log-probability of every token given those before it in its row, `[R, L]` float32; 0 for the first.

    One causal pass without a cache. Logits are made of `chunk` tokens of every row at a time, `[R, C, V]`, and made again
    for the gradient. With a row's temperature they are the `tempered` ones of `specjax.rollout`, and at 1 the `raw` ones.

    Args:
      lm: the model, with `unembed`.
      params: its parameters, `params["target"]` of a decoder.
      tokens: `[R, L]` int32, padded on the right; what stands after a text changes nothing before it.
      temperature: one, or `[R]`; 0 counts as 1.
      chunk: C.
    """
    rows, size = tokens.shape
    at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tokens.shape)
    block = Block(tokens, at, jnp.zeros((rows,), jnp.int32))
    final = lm(params, block, None, wants=Wants(final=True)).final
    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))
    heat = jnp.where(heat > 0, heat, 1.0)[:, None, None]
    compare = lambda each: -surprise(lm.unembed(params, each[0]) / heat, each[1])
    found = chunked(compare, (final[:, :-1], tokens[:, 1:]), chunk)
    return jnp.pad(found, ((0, 0), (1, 0)))
