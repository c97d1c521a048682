"""A model that is a table, a language whose local and aligned distributions differ, and both distributions by enumeration."""

import dataclasses
import functools

import jax
import numpy as np

import specjax
from specjax.constrain import Table as Language

EOS, NEW, HEAT, PROMPT = 3, 4, 0.8, (1, 2)
LOGITS = 1.2 * jax.random.normal(jax.random.key(11), (4, 4, 4))
FOLLOWING = np.asarray([[1, 2, -1, -1], [-1, -1, 1, -1], [3, 4, 4, -1], [3, 3, -1, -1], [-1, 4, 3, -1]], np.int32)
"""A language by its states: texts that begin with 0 can only go on with 2, and those that begin with 1 in many ways."""
ACCEPTS = np.asarray([False, True, False, True, True])


@functools.cache
def language():
    return Language.of("test", FOLLOWING, np.arange(4, dtype=np.int32), ACCEPTS, (EOS,))


def dist(context):
    """The model's distribution of the next token `[V]`, in float64."""
    scores = np.asarray(LOGITS, np.float64)[context[-2], context[-1]] / HEAT
    p = np.exp(scores - scores.max())
    return p / p.sum()


def texts(state=0, text=(), p=1.0, local=1.0):
    """Every text of the language of at most NEW tokens, with its probability under the model and under the local rule."""
    if len(text) == NEW or text[-1:] == (EOS,):
        return {text: (p, local)}
    own = dist((*PROMPT, *text))
    allowed = np.flatnonzero(language().allowed(state, NEW - len(text)))
    found = {}
    for token in allowed.tolist():
        more = local * own[token] / own[allowed].sum()
        found |= texts(language().next(state, token), (*text, token), p * own[token], more)
    return found


@functools.partial(jax.jit, static_argnums=0)
def _written(search, params, prompts):
    """Prompts to the end of their texts, in one program, which costs a test less than three."""
    blank = search.empty(params, prompts.tokens.shape[0], 8)
    state = search.prefill(params, blank, prompts)
    return jax.lax.while_loop(lambda own: ~own.done.all(), lambda own: search.step(params, own)[0], state)


def drawn(search, count, seed=0):
    """The final state of so many rows, on the host, and the new tokens of each."""
    sampling = {"temperature": HEAT, "constraint": [language()] * count}
    prompts = specjax.Prompts.of([PROMPT] * count, max_new_tokens=NEW, eos=(EOS,), seed=seed, **sampling)
    columns = {name: prompts.sampling.columns[name] for name in sampling}  # no other warper is compiled
    prompts = dataclasses.replace(prompts, sampling=specjax.sampling.SamplingArrays(columns))
    state = jax.device_get(_written(search, {"target": LOGITS}, prompts))
    return state, [tuple(row[2:end].tolist()) for row, end in zip(state.tokens, state.length, strict=True)]


@functools.cache
def exact():
    """The probability that a text is in the language, and by text the aligned distribution and the local one."""
    found = texts()
    evidence = sum(p for p, _ in found.values())
    return evidence, {text: p / evidence for text, (p, _) in found.items()}, {text: q for text, (_, q) in found.items()}


def distance(counts, wanted):
    """The total variation between weights of texts and a distribution."""
    total = sum(counts.values())
    return sum(abs(counts.get(text, 0.0) / total - p) for text, p in wanted.items()) / 2
