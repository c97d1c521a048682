"""A decode looked at step by step, for the tests of drafters over features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.conformance import MIXED, TARGET, params, start

import specjax
from specjax.lm import Block, Wants

GREEDY = MIXED.pick(0, 3, 1)  # one prompt of a single token, a long one, a sampled one


@functools.partial(jax.jit, static_argnums=0)
def _step(decoder, model, state):
    return decoder.step(model, state)


def steps(drafter, model, count, rows=GREEDY):
    """The states after 0, 1, ... `count` steps, and what each step said."""
    decoder = specjax.speculative(TARGET, drafter)
    states, infos = [start(decoder, rows, model=model)], []
    for _ in range(count):
        state, info = _step(decoder, model, states[-1])
        states.append(state)
        infos.append(info)
    return decoder, states, infos


@functools.cache
def read_text(row_text: tuple[int, ...], wants: Wants):
    """The target over one whole text, without a cache."""
    tokens = jnp.asarray([row_text], jnp.int32)
    block = Block(tokens, jnp.arange(len(row_text))[None], jnp.zeros((1,), jnp.int32))
    return jax.jit(lambda target, block: TARGET(target, block, None, wants=wants))(params()["target"], block)


def row_texts(state):
    """Committed tokens of every row."""
    return [tuple(np.asarray(state.tokens)[b, : int(state.length[b])].tolist()) for b in range(state.length.shape[0])]
