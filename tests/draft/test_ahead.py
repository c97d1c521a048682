"""Drafters that write the next block while the target reads this one: their steps are those of a slow loop, their branches
those of the published example, and neither model waits for the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised
from support.conformance import texts
from support.small_target import PROMPTS, TARGET, begin, params_of, weights, with_layers

import specjax
from specjax import decoder as decoding
from specjax.assembly import registry
from specjax.draft import MirrorSD, Pearl, Saguaro
from specjax.lm import Block, Wants
from specjax.plan.order import apart
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.tree import Topology, Tree

DRAFT = with_layers(TARGET, 1)
KINDS = {
    "pearl": Pearl(DRAFT, length=4),
    "saguaro": Saguaro(DRAFT, length=2, fan=2),
    "mirror_sd": MirrorSD(DRAFT, length=2, fan=2, exit=1),
}
CUT = 32


@functools.partial(jax.jit, static_argnums=0)
def whole(lm, params, tokens):
    at = jnp.arange(CUT)[None]
    return lm(params, Block(tokens, at, jnp.zeros((1,), jnp.int32)), None, wants=Wants(logits=True)).logits[0]


@functools.cache
def scores(kind, text):
    """The logits after a text, by one pass over all of it: of the target, of the draft model, or of the early exit."""
    target = weights(TARGET)
    lower = {**target, "layers": {0: target["layers"][0]}}
    lm, params = {"target": (TARGET, target), "draft": (DRAFT, lower)}[kind]
    tokens = np.zeros((1, CUT), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(whole(lm, params, jnp.asarray(tokens)))[len(text) - 1]


def written(text, count):
    for _ in range(count):
        text = (*text, int(scores("draft", text).argmax()))
    return text[len(text) - count :]


def slow(drafter, prompt, new):
    """The text of a greedy row, and how many drafted tokens each of its steps accepted."""
    text, accepted, branches, block = tuple(prompt), [], {}, drafter.block
    key = None
    while len(text) < len(prompt) + new:
        pending = branches.get(key)
        if pending is None:
            pending = () if isinstance(drafter, Pearl) else written(text, block)
        branches = {}
        for point in [len(pending)] if isinstance(drafter, Pearl) else range(len(pending) + 1):
            here = (*text, *pending[:point])
            logits = scores("draft", here).copy()  # the early exit of the target is the draft model here
            if point < len(pending):
                logits[pending[point]] = -np.inf
            for guess in np.argsort(-logits)[: drafter.guessed].tolist():
                branches[point, guess] = written((*here, guess), block)
        count = 0
        while count < len(pending) and scores("target", (*text, *pending[:count])).argmax() == pending[count]:
            count += 1
        own = int(scores("target", (*text, *pending[:count])).argmax())
        text, key = (*text, *pending[:count], own), (count, own)
        accepted.append(count)
    return list(text[len(prompt) : len(prompt) + new]), accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_a_slow_loop(name):
    drafter = KINDS[name]
    decoder = dataclasses.replace(specjax.speculative(TARGET, drafter), whole=True)
    model = params_of(drafter, TARGET, ())
    state = begin(decoder, model)
    greedy = state.sampling.replace(temperature=jnp.zeros_like(state.sampling.temperature))
    state = decoding.run(decoder, model, dataclasses.replace(state, sampling=greedy))
    for row, prompt in enumerate(PROMPTS):
        text, accepted = slow(drafter, prompt, 12)
        assert texts(state)[row] == text
        counts = np.bincount(accepted, minlength=drafter.block + 1)
        assert np.asarray(state.stats.accepted)[row].tolist() == counts.tolist()
    assert np.asarray(state.stats.accepted)[:, 1:].sum()


def test_the_branches_of_the_published_example():
    """Logits of three places, tokens 0 and 4 drafted, two guesses each."""
    logits = jnp.asarray([[[5, 4, 3, 2, 1], [1, 2, 3, 4, 5], [0, 0, 9, 1, 2]]], jnp.float32)
    tree = Tree.of(Topology.chain(2), jnp.asarray([[3, 0, 4]]), jnp.ones((1, 3), bool))
    one = jnp.ones((1,), jnp.int32)
    sampler = Sampler(row_keys(0, ["a"]), jnp.asarray([[3, 0]]), one, one > 0, SamplingArrays.make(1), greedy=True)
    drafter = Saguaro(DRAFT, length=2, fan=2)
    points = drafter.points(jnp.asarray([2]))
    assert drafter.likeliest(tree, sampler, points, logits).tolist() == [[[1, 2], [3, 2], [2, 4]]]
    points = drafter.points(jnp.asarray([1]))
    assert drafter.likeliest(tree, sampler, points, logits)[0, 2].tolist() == [-1, -1], "there is no such place"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pearl", "mirror_sd"])
def test_neither_model_waits_for_the_other(name):
    """In the compiled step, the draft model's passes and the target's layers are apart. After a miss `mirror_sd` drafts
    before the target's pass, as `saguaro` does; that is a branch, which a step without a miss does not take."""
    drafter = KINDS[name]
    decoder = dataclasses.replace(specjax.speculative(TARGET, drafter), whole=True, greedy=True)
    model = {"target": TARGET.abstract(), "draft": DRAFT.abstract()}
    state = jax.eval_shape(lambda model: decoder.empty(model, 2, 32), model)
    text = optimised(jax.jit(decoder.step).lower(model, state)).as_text()
    layers = lambda op, scope: f"/{scope}/" in op.source and "layer_" in op.source and "dot_general" in op.source
    missed = lambda op: "/cond/" in op.source or "/exit/" in op.source  # drafted before the target's pass
    found = apart(text, lambda op: layers(op, "draft") and not missed(op), lambda op: layers(op, "target"))
    assert found.free and not found.waits and not found.awaited


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Pearl(DRAFT, length=1), "pearl needs length >= 2, got 1"),
        (lambda: Saguaro(DRAFT, length=0), "saguaro needs length and fan of at least 1, got length=0, fan=3"),
        (lambda: MirrorSD(DRAFT, fan=0), "mirror_sd needs length and fan of at least 1"),
        (lambda: Saguaro(DRAFT, fan=24).bind(TARGET), "saguaro guesses 24 tokens and the draft model has 24"),
        (lambda: MirrorSD(DRAFT, exit=2).bind(TARGET), "some of its 2 layers, not after 2: choose exit from 1 to 1"),
    ],
)
def test_what_is_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()


def test_lines():
    made = lambda line: registry.parse("drafter", registry.DRAFTERS, line).fields
    assert made("pearl:model=folder,length=6") == {"length": 6}
    assert made("saguaro") == {"length": 4, "fan": 2} and made("mirror_sd:exit=3") == {"exit": 3}
