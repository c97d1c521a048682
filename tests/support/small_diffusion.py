"""A small masked-diffusion model with random weights, four rows to complete, their texts, and every policy there is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.shapes import changed

from specjax import decoder as decoding
from specjax.assembly.companions import Stored
from specjax.assembly.registry import CACHES, UNMASKS
from specjax.diffusion import diffusion
from specjax.diffusion.common import CHOOSE
from specjax.diffusion.unmask import Learn2PD
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, llama_config
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.noise import uniform

MASK, V, L = 23, 24, 32
LM = LlamaLM(llama_config(V, 32, 48, 2, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True))
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5, 3), (5, MASK, MASK, 8, 9, 7, MASK, 2))  # the last one has open spans
LIMITS = (19, 22, 17, 14)


@functools.cache
def params():
    """Random weights, sharpened so that some predictions are sure and others are not."""
    return {"target": jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, jax.jit(LM.init)(jax.random.key(3)))}


GUIDE = LlamaLM(changed(LM.config, num_hidden_layers=1))
LOADED = {"guide": lambda kind: kind(GUIDE, 4), "filter": lambda kind: kind(block_length=8)}
"""Policies that something is loaded for, by what that is."""


def policy_of(name):
    """A policy of the registry, as its line makes it."""
    made = UNMASKS[name].make()
    return LOADED[UNMASKS[name].loads](made.kind) if isinstance(made, Stored) else made


def caches(**fields):
    """The cache policies of the registry that keep anything, with those of these fields that each has; where fields are named,
    only those that have one."""
    found = {}
    for name, entry in CACHES.items():
        cache = entry.make(**{key: fields[key] for key in fields.keys() & entry.fields.keys()})
        if cache.keeps and (not fields or fields.keys() & entry.fields.keys()):
            found[name] = cache
    return found


def going_together(**settings):
    """Decoders of every policy of the registry that these settings go with, `{name: decoder}`."""
    found = {}
    for name in UNMASKS:
        try:
            found[name] = diffusion(LM, MASK, policy_of(name), block_length=8, **settings)
        except ValueError:
            continue
    return found


@functools.cache
def everything():
    """Parameters of the model, and of whatever a policy needs besides: the guide has the model's first layer."""
    target = params()["target"]
    filter = Learn2PD(block_length=8).init_params(jax.random.key(0), None)
    return {"target": target, "guide": {**target, "layers": {0: target["layers"][0]}}, "unmask": filter}


def make(policy=None, block_length=8, shift=False):
    return diffusion(LM, MASK, policy, block_length=block_length, shift=shift)


def begin(
    decoder, rows=range(4), temperature=0.0, eos=None, limits=LIMITS, capacity=L, model=None, slots=None, **sampling
):
    """A state of these rows; with `slots` one of so many, of which the others stay free. `sampling` are columns."""
    model, own = model or params(), len(rows)
    count = slots or own
    tokens, free = np.full((count, 8), 0, np.int32), [1] * (count - own)
    for i, row in enumerate(rows):
        tokens[i, : len(PROMPTS[row])] = PROMPTS[row]
    prompts = Prompts(
        jnp.asarray(tokens),
        jnp.asarray([*(len(PROMPTS[row]) for row in rows), *free]),
        row_keys(0, [*map(str, rows), *[""] * len(free)]),
        jnp.asarray([*(limits[row] for row in rows), *free]),
        SamplingArrays.make(count, temperature=temperature, **sampling),
        None if eos is None else jnp.full((count, 1), eos),
    )
    state = decoding.empty(decoder, model, count, capacity, None, 1, form=prompts.sampling.form)
    return decoding.insert(decoder, model, state, jnp.asarray([*range(own), *[count] * len(free)]), prompts)


def texts(state):
    return [np.asarray(state.tokens)[i, : int(n)].tolist() for i, n in enumerate(state.length)]


@functools.cache
def _forward(size):
    positions = jnp.arange(size)[None]
    return jax.jit(
        lambda tokens: LM(
            params()["target"], Block(tokens[None], positions, jnp.zeros(1, int), causal=False), None,
            wants=Wants(logits=True),
        ).logits[0]
    )  # fmt: skip


def forward(canvas):
    """Logits `[L, V]` of a whole canvas, in one plain pass."""
    return _forward(len(canvas))(jnp.asarray(canvas))


def distribution(canvas):
    """Probabilities `[L, V]` of a whole canvas without the mask, in float64."""
    logits = np.array(forward(canvas), np.float64)
    logits[:, MASK] = -np.inf
    dist = np.exp(logits - logits.max(axis=1, keepdims=True))
    return dist / dist.sum(axis=1, keepdims=True)


def uniform_of(row):
    """The noise that a policy meets in a row: a function of position and pass."""
    key = row_keys(0, [str(i) for i in range(4)])[row]
    of_pass = lambda step: jax.random.fold_in(key, step)[None]
    return lambda at, step: float(uniform(of_pass(step), jnp.asarray([[at]]), CHOOSE)[0, 0])
