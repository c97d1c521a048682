"""Chains judged many times over: distributions by context for enumeration, and texts of the jitted decoder to be
counted."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from support.compiled import OPTIMISED

import specjax
from specjax.draft import ModelDrafter
from specjax.expand import Chain
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import rejection as oracle
from specjax.reference import statistics, warpers
from specjax.sampling import SamplingArrays
from specjax.verify import Coupled

V = 4


def tables(rng, length, kind="full"):
    """A distribution for every context of up to `length` - 1 tokens."""
    out = []
    for i in range(length):
        dist = rng.dirichlet(np.full(V, 0.7), (V,) * i)
        if kind == "sparse":
            dist = np.where((rng.random(dist.shape) < 0.5) & (dist < dist.max(-1, keepdims=True)), 0.0, dist)
            dist = dist / dist.sum(-1, keepdims=True)
        elif kind == "one_hot":
            dist = np.eye(V)[rng.integers(0, V, (V,) * i)]
        out.append(dist)
    return out


def along(dists, tokens):
    """The distributions met along rows of tokens: `[M, len(distributions), V]`."""
    met = [dist[tuple(tokens[:, :i].T)] for i, dist in enumerate(dists)]
    return np.stack([np.broadcast_to(dist, (len(tokens), V)) for dist in met], axis=1)


ROWS, NEW, ALPHA = 60_000, 3, 1e-3
PROMPT = [1, 2, 0, 3, 1, 2]
TARGET = TabularLM(V, order=2)
PARAMS = {"target": random(jax.random.key(0), V, 2), "draft": random(jax.random.key(1), V, 2)}
OPTIONS = {"temperature": 1.4, "min_p": 0.06}
"""A filter that sorts nothing, which a program compiled in a hurry would do slowly."""
MODEL = ModelDrafter(TabularLM(V, order=2), Chain(2))
start = jax.jit(
    lambda decoder, prompts: decoder.init(PARAMS, prompts, capacity=len(PROMPT) + NEW + decoder.slack), static_argnums=0
)


optimised_run = jax.jit(specjax.run, static_argnums=0, compiler_options=OPTIMISED)


def drawn_by(options):
    """Columns of what is asked for, and of no other warper."""
    made = SamplingArrays.make(ROWS, **options)
    return SamplingArrays({name: made[name] for name in ("temperature", *options)})


def generate(drafter, verifier, seed=0, steps=NEW, optimise=False, **options):
    """`ROWS` texts; one shape throughout, so that a decoder is compiled once: `optimise` where its steps run for longer."""
    decoder = specjax.speculative(TARGET, drafter, verifier)
    many = lambda number: jnp.full((ROWS,), number)
    prompts = Prompts(
        jnp.broadcast_to(jnp.asarray(PROMPT), (ROWS, len(PROMPT))),
        many(len(PROMPT)),
        jax.random.split(jax.random.key(seed, impl="threefry2x32"), ROWS),
        many(len(PROMPT) + NEW),
        drawn_by(options or OPTIONS),
    )
    state = start(dataclasses.replace(decoder, verifier=Coupled()), prompts)
    return (optimised_run if optimise else specjax.run)(decoder, PARAMS, state, steps)


def context_tables(params, length):
    """The exact warped distributions of the first `length` tokens after the prompt."""
    out = []
    for i in range(length):
        contexts = np.array(list(itertools.product(range(V), repeat=i)), int).reshape(V**i, i)
        prompt = np.broadcast_to(PROMPT, (len(contexts), len(PROMPT)))
        logits = TARGET.next_log_probs(params, np.concatenate([prompt, contexts], axis=1))
        dists = [warpers.softmax(warpers.warp(z, OPTIONS["temperature"], share=OPTIONS["min_p"])) for z in logits]
        out.append(np.stack(dists).reshape((V,) * (i + 1)))
    return out


@functools.cache
def exact():
    return context_tables(PARAMS["target"], NEW)


def sampled_p_value(drafter, verifier, seed=0, optimise=False):
    return p_value(generate(drafter, verifier, seed, optimise=optimise))


def p_value(state):
    """Of finished texts under the exact joint distribution of their tokens."""
    text = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + NEW]
    assert (np.asarray(state.length) == len(PROMPT) + NEW).all()
    counts = np.zeros((V,) * NEW)
    np.add.at(counts, tuple(text.T), 1)
    return statistics.chi_square(counts, oracle.joint(exact()))
