"""A target so small that every drafter of the conformance table can be tried on it, and what it writes, by whole passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.conformance import DRAFTERS as LINES
from support.other_tokens import other_params, with_other
from support.random_weights import drawn, whole_numbers
from support.shapes import changed

from specjax import decoder as decoding
from specjax.assembly.companions import Stored
from specjax.assembly.registry import DRAFTERS, EXPANDERS
from specjax.draft import (
    S2D,
    Cascade,
    Clover2,
    DiffuSpec,
    Drafter,
    EasySpec,
    Lud,
    ModelDrafter,
    Pard,
    Pard2,
    Rasd,
    Rest,
    SelfDiffusion,
    Switch,
    Trained,
)
from specjax.draft.adaptive import Adaptive
from specjax.draft.ahead import Ahead
from specjax.draft.datastore import build
from specjax.draft.fuse import Fused
from specjax.draft.one_pass import OnePass
from specjax.draft.vocabularies.shared import OtherTokens
from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, LlamaLM, llama_config
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sampling.noise import gumbel
from specjax.state import Finish

TARGET = LlamaLM(llama_config(24, 32, 48, 2, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True))
DEEP = ("swift", "del", "hidden_transfer", "s2d")
"""Drafters that leave out layers, choose among them, enter several or have the first: two are enough for the
others, and compile sooner."""

PROMPTS = (3, 1, 4, 1, 5, 3, 1, 4), (2,), (9, 9, 4, 10, 9)
HEATS = 0.0, 1.0, 0.7
NAMES = "a", "b", "c"
NEW, CAPACITY, WIDTH = 12, 32, 8
FORM = (("temperature", ()),)
"""No other column, so that no other warper is compiled: `sampling/test_same_text.py` has all of them."""


def with_layers(lm: LlamaLM, count: int) -> LlamaLM:
    """The model with as many layers."""
    return dataclasses.replace(lm, config=changed(lm.config, num_hidden_layers=count))


def with_experts(lm: LlamaLM = TARGET) -> LlamaLM:
    """The model with four experts in every layer, of which a token takes two."""
    return dataclasses.replace(lm, config=changed(lm.config, experts=ExpertsConfig(4, 2, 24)))


def target_of(name: str, lm: LlamaLM = TARGET) -> LlamaLM:
    """What a line is over."""
    return with_experts(lm) if name == "main_experts" else with_layers(lm, 3) if name in DEEP else lm


def line_of(name: str, lm: LlamaLM = TARGET) -> Drafter:
    """A drafter of the conformance table, or of the registry where that has none of its name, made small.

    Raises:
      LookupError: where nothing can make one.
    """
    if name in LINES:
        return smaller(LINES[name], lm)
    expander = name.removeprefix("draft-")
    if expander in EXPANDERS:
        return ModelDrafter(with_layers(lm, 1), EXPANDERS[expander].make())
    made = DRAFTERS[name].make()
    try:
        return made.kind(**made.fields) if isinstance(made, Stored) else made
    except TypeError as error:
        raise LookupError(
            f"nothing can hold the drafter {name!r} to its text: give it a line in tests/support/conformance.py"
        ) from error


def lines() -> list[str]:
    """The whole table, and what is registered and has no line there."""
    kinds = {name.partition("-")[0] for name in LINES}
    return [
        *LINES,
        *(name for name in DRAFTERS if name not in kinds),
        *(grown_by(name) for name in EXPANDERS if grown_by(name) not in LINES),
    ]


def grown_by(expander: str) -> str:
    """An expander's line: the first of the table's that has it, or the draft model's."""
    return next((name for name in LINES if name.partition("-")[2] == expander), f"draft-{expander}")


def first_lines() -> list[str]:
    """One line a registered drafter."""
    return [next(name for name in lines() if name.partition("-")[0] == drafter) for drafter in DRAFTERS]


def layers_of(drafter: Drafter) -> int:
    """How many layers a line's draft model has: those of its last exit, or one; four, if some are to form a group."""
    return drafter.exits[-1] if isinstance(drafter, S2D) else 4 if isinstance(drafter, EasySpec) else 1


def smaller(drafter: Drafter, lm: LlamaLM) -> Drafter:
    """The drafter with a draft model of one layer, or as many as it needs, and the target's vocabulary."""
    if isinstance(drafter, Fused):
        return dataclasses.replace(drafter, a=smaller(drafter.a, lm), b=smaller(drafter.b, lm))
    if isinstance(drafter, Switch):
        return dataclasses.replace(drafter, members=tuple(smaller(member, lm) for member in drafter.members))
    if isinstance(drafter, Adaptive):
        return dataclasses.replace(drafter, drafter=smaller(drafter.drafter, lm))
    if isinstance(drafter, OtherTokens):
        return with_other(drafter, with_layers(lm, 1))
    changes = (
        {"lm": with_layers(lm, layers_of(drafter))}
        if isinstance(drafter, ModelDrafter | OnePass | Cascade | Ahead)
        else {}
    )
    changes |= {"mask_id": lm.vocab_size - 1} if isinstance(drafter, OnePass | Pard | SelfDiffusion) else {}
    changes |= {"pad": lm.vocab_size - 1} if isinstance(drafter, Lud) else {}
    changes |= {"layers": 1} if isinstance(drafter, Clover2) else {}
    return dataclasses.replace(drafter, **changes)


@functools.cache
def weights(lm: LlamaLM = TARGET):
    """Random weights, sharpened so that greedy text has structure, and with these numbers repeats itself in the first row.

    Layers above the first one do less, so that it is right often enough as a draft model, and not always.
    """
    made = drawn(jax.jit(lm.init)(jax.random.key(7)), seed=12)
    times = lambda factor, part: jax.tree.map(lambda x: jnp.asarray(x * factor if x.ndim > 1 else x), part)
    layers = {index: times(1.4 if index else 2, layer) for index, layer in made["layers"].items()}
    return times(2, made) | {"layers": layers}


def params_of(drafter: Drafter, lm: LlamaLM, said):
    """The target's parameters and the drafter's: the target's first layers as a draft model, of which the last may come
    several times, and a store of what was `said`."""
    target = weights(lm)
    last = lm.num_layers - 1
    draft = {**target, "layers": {i: target["layers"][min(i, last)] for i in range(layers_of(drafter))}}
    store = lambda: jax.tree.map(jnp.asarray, build(said, lm.vocab_size))
    if isinstance(drafter, Trained):
        made = drafter.bind(lm).init_params(jax.random.key(8), target)
        own = jax.tree.map(jnp.asarray, drawn(made, seed=1))
    elif isinstance(drafter, Rest | Rasd):
        own = (draft, store()) if isinstance(drafter, Rasd) else store()
    elif isinstance(drafter, Pard2):
        size = lm.config.hidden_size
        features = size * len(drafter.bind(lm).joined.target_layers)
        own = {"lm": draft, "fc": {"kernel": jnp.asarray(whole_numbers((features, size), 5))}}
    elif isinstance(drafter, OtherTokens):
        own = other_params(lm, draft)
    elif isinstance(drafter, DiffuSpec):
        own = {"model": draft, "trigrams": None}
    elif isinstance(drafter, Switch):
        own = tuple(draft if member.needs_params else None for member in drafter.members)
    elif isinstance(drafter, Adaptive):
        own = {"drafter": draft, "rule": None}
    else:
        own = (None, draft) if isinstance(drafter, Fused) else draft if drafter.needs_params else None
    return {"target": target, "draft": own}


@functools.partial(jax.jit, static_argnums=0)
def scores_of(lm, params, tokens, keys, heats):
    """Scores `[B, T, V]` of what follows every position, by one pass over whole texts."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    block = Block(tokens, at, jnp.zeros(len(tokens), jnp.int32))
    logits = lm(params, block, None, wants=Wants(logits=True)).logits
    noisy = logits / jnp.maximum(heats, 1e-6)[:, None, None] + gumbel(keys, at + 1, lm.vocab_size)
    return jnp.where((heats > 0)[:, None, None], noisy, logits)


@functools.cache
def free_texts(lm: LlamaLM) -> tuple[tuple[int, ...], ...]:
    """What every row says, whatever may end it: the argmax of its logits, or of their distribution and the noise of the
    place."""
    tokens = np.zeros((len(PROMPTS), max(map(len, PROMPTS)) + NEW), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    keys, heats = row_keys(0, NAMES), jnp.asarray(HEATS)
    for step in range(NEW):
        scores = np.asarray(scores_of(lm, weights(lm), jnp.asarray(tokens), keys, heats))
        for row, prompt in enumerate(PROMPTS):
            tokens[row, len(prompt) + step] = scores[row, len(prompt) + step - 1].argmax()
    return tuple(tuple(row[len(p) : len(p) + NEW].tolist()) for row, p in zip(tokens, PROMPTS, strict=True))


def said_by(lm: LlamaLM) -> list[tuple[int, ...]]:
    """What every other row says, with its prompt."""
    return [(*prompt, *text) for prompt, text in zip(PROMPTS, free_texts(lm), strict=True)][::2]


def eos_of(lm: LlamaLM) -> int:
    """A token that ends the second row in the middle, and no other."""
    return free_texts(lm)[1][7]


def plain(lm: LlamaLM) -> list[tuple[list[int], Finish]]:
    """Every row's text, cut where it ends, and why it does."""
    eos = eos_of(lm)
    cut = [
        (text[: text.index(eos) + 1], Finish.EOS) if eos in text else (text, Finish.LENGTH) for text in free_texts(lm)
    ]
    return [(list(text), finish) for text, finish in cut]


def begin(decoder, model, rows=(0, 1, 2), prompts=PROMPTS, eos=-1, state=None, slots=None, prefix=0, count=3):
    """A state with these rows in its first slots, or in `slots` of a running one; the others are free, or stay.

    Args:
      decoder: of the rows.
      model: its parameters.
      rows: which of `PROMPTS`.
      prompts: what they begin with in place of these; they end where they would.
      eos: ends a row.
      state: which is donated; None: an empty one.
      slots: where the rows go.
      prefix: how many tokens of the first prompt all of them begin with, which are read once.
      count: of slots.
    """
    spare = count - len(rows)
    tokens, lengths = np.zeros((count, CAPACITY), np.int32), np.ones(count, np.int32)
    limit, heats = lengths + 1, np.zeros(count, np.float32)
    for at, row in enumerate(rows):
        tokens[at, : len(prompts[row])] = prompts[row]
        lengths[at], limit[at], heats[at] = len(prompts[row]), len(PROMPTS[row]) + NEW, HEATS[row]
    if state is None:
        state = decoding.empty(decoder, model, count, CAPACITY, jnp.float32, 1, form=FORM)
    keys = row_keys(0, [*(NAMES[row] for row in rows), *[""] * spare])
    given, sampling = jax.device_put((tokens, lengths)), SamplingArrays({"temperature": jnp.asarray(heats)})
    entering = Prompts(*given, keys, jnp.asarray(limit), sampling, jnp.full((count, 1), eos), WIDTH)
    shared = None
    if prefix:
        state, shared = decoding.read_prefix(decoder, model, state, jnp.asarray(prompts[0][:prefix]))
    at = jnp.asarray([*(slots or range(len(rows))), *[count] * spare])
    return decoding.insert(decoder, model, state, at, entering, prefix=shared)
