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


SIZE = 64
"""Texts of any length share a program: what stands after a text changes nothing in it, and is cut off."""


def _padded(row_text):
    return jnp.asarray([[*row_text, *[0] * (SIZE - len(row_text))]], jnp.int32)


def _whole(tokens):
    return Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros((1,), jnp.int32))


def _cut(tree, size):
    return jax.tree.map(lambda x: np.asarray(x)[:, :size], tree)


@functools.partial(jax.jit, static_argnums=0)
def _read(wants, target, tokens):
    return TARGET(target, _whole(tokens), None, wants=wants)


@functools.cache
def read_text(row_text: tuple[int, ...], wants: Wants):
    """The target over one whole text, without a cache."""
    return _cut(_read(wants, params()["target"], _padded(row_text)), len(row_text))


@functools.partial(jax.jit, static_argnums=0)
def _read_pairs(drafter, model, tokens):
    features = drafter.features(TARGET(model["target"], _whole(tokens), None, wants=drafter.feature_wants))
    return drafter.read(model, features[:, :-1], _whole(tokens[:, 1:]), None)


def read_pairs(drafter, model, row_text: tuple[int, ...]):
    """What a head makes of a whole text's pairs of a feature and the token after it, without a cache: outputs and
    delta."""
    return _cut(_read_pairs(drafter, model, _padded(row_text)), len(row_text) - 1)


def row_texts(state):
    """Committed tokens of every row."""
    return [tuple(np.asarray(state.tokens)[b, : int(state.length[b])].tolist()) for b in range(state.length.shape[0])]
