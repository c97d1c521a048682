"""The distributions that a text is drawn from, token by token, one text at a time.

Sender and reader compute them in programs of the same shapes. So both have the same bits, whatever else they are asked for.
In the shape descriptions `V` denotes the vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lm import Block, Wants
from specjax.sampling.sampler import Sampler
from specjax.search.stepwise import Asked
from specjax.search.writer import Writer
from specjax.settings import settled
from specjax.sharding.distributed import to_host
from specjax.speculative import write

Array = jax.Array


class Text:
    """A text that goes on after a prompt.

    Args:
      model: a `specjax.models.Model`.
      asked: one prompt.
    """

    def __init__(self, model: Any, asked: Asked):
        writer = Writer(model, 1, asked, ())
        writer.enter(asked)
        self.decoder, self.params, self.state = writer.decoder, writer.params, writer.state
        self.room = int(writer.most[0]) - len(asked.ids[0])
        self.tokens: list[int] = []

    def next(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids of the tokens that may follow, and their probabilities in float64; None if no number is finite."""
        last, count = (self.tokens[-1], 1) if self.tokens else (0, 0)
        given = jax.device_put((np.full((1, 1), last, np.int32), np.full(1, count, np.int32)))
        self.state, log_probs = _advanced(self.decoder, self.params, self.state, *given)
        masses = np.exp(to_host(log_probs)[0].astype(np.float64))
        ids = np.flatnonzero(masses > 0)
        return (ids, masses[ids] / masses[ids].sum()) if np.isfinite(masses).all() and ids.size else None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
@settled
def _advanced(decoder, params, state, token: Array, count: Array):
    """The state with `count` `[1]` more tokens, and the next token's log-probabilities `[1, V]` after all warpers."""
    tokens = jnp.where(count[:, None] > 0, write(state.tokens, token, state.length), state.tokens)
    state = dataclasses.replace(state, tokens=tokens, length=state.length + count)
    begin = state.length - 1
    root = jnp.take_along_axis(state.tokens, begin[:, None], axis=1)
    output = decoder.target(params["target"], Block(root, begin[:, None], begin), state.cache, wants=Wants(logits=True))
    cache = decoder.target.commit(state.cache, output.delta, None, begin, jnp.ones_like(begin))
    live = jnp.ones(begin.shape, bool)
    sampler = Sampler(
        state.key, state.tokens, state.length, live, state.sampling, begin=state.prompt_length, eos=state.eos,
        carried=state.carried, limit=state.limit,
    )  # fmt: skip
    log_probs = sampler.log_probs(output.logits.astype(jnp.float32))[:, 0]
    return dataclasses.replace(state, cache=cache), log_probs
