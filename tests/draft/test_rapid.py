"""RAPID: prompts made short as loops by hand make them, and drafts that are those of the short text, at its own positions."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFT, TARGET, Rows, but_slow, complete, params, plain, start, texts
from support.small_target import TARGET as SMALL

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import build_drafter
from specjax.draft import Rapid
from specjax.draft.rapid.retrieval import Shortening
from specjax.expand import Chain
from specjax.lm import Block, Wants
from specjax.models import Model
from specjax.models.caches import EMS
from specjax.models.guided import Guided

BLANK = (91, 92)


def by_hand(how, tokens):
    """A shortened prompt, step by step."""
    first = min(how.sinks, len(tokens))
    end = max(len(tokens) - how.question, first)
    question = tokens[end:]
    chunks = [tokens[i : min(i + how.chunk, end)] for i in range(first, end, how.chunk)]
    average = sum(map(len, chunks)) / max(len(chunks), 1)

    def weight(token):
        within = sum(token in own for own in chunks)
        return math.log(1 + (len(chunks) - within + 0.5) / (within + 0.5)) if within else 0.0

    def similar(own):
        score = 0.0
        for token in question:
            often = own.count(token)
            score += weight(token) * often * 2.5 / (often + 1.5 * (0.25 + 0.75 * len(own) / average))
        return score / max(sum(map(weight, question)), 1e-9)

    most = math.ceil(max(len(tokens) / (how.chunk * how.shorten), min(how.least, len(tokens)) / how.chunk))
    best = sorted(range(len(chunks)), key=lambda i: (-similar(chunks[i]), i))[:most]
    stay = [i for i in sorted(best) if similar(chunks[i]) >= how.similarity]
    text, last = tokens[:first], -1
    for i in stay:
        text = [*text, *(how.joint if i > last + 1 else ()), *chunks[i]]
        last = i
    return [*text, *(how.joint if last < len(chunks) - 1 else ()), *question]


HOWS = [
    Shortening(chunk=4, shorten=3, least=8, similarity=0.1, question=5, sinks=2, joint=BLANK),
    Shortening(chunk=3, shorten=2, least=1, similarity=0.0, question=4, sinks=0, joint=BLANK),
    Shortening(chunk=5, shorten=8, least=60, similarity=0.3, question=3, sinks=1),
]


@pytest.mark.parametrize("how", but_slow(HOWS, *HOWS[1:]))
def test_a_prompt_is_made_short(how):
    """Ragged prompts, shorter than the question and longer than what stays, of few kinds of tokens, so that chunks tie."""
    rng, capacity = np.random.default_rng(1), 70
    lengths = [1, 2, 4, 7, 8, 11, 23, 37, 52, 69, 70, 70]
    tokens = rng.integers(0, 9, (len(lengths), capacity)).astype(np.int32)
    text, size = jax.jit(how.shortened)(jnp.asarray(tokens), jnp.asarray(lengths))
    assert text.shape[1] == how.room(capacity)
    whole = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    got = [row[:length].tolist() for row, length in zip(np.asarray(text), size.tolist(), strict=True)]
    assert got == [by_hand(how, row) for row in whole]
    assert got[:3] == whole[:3] and any(len(own) < len(row) - how.chunk for own, row in zip(got, whole, strict=True))


def test_how_many_chunks_stay():
    """By the published formula: at least 4,096 tokens of them, and a 32nd of a long prompt."""
    lengths = np.array([1, 128, 129, 1000, 4096, 5000, 131_072, 131_073, 1_000_000])
    wanted = [math.ceil(max(n / (128 * 32), min(4096, n) / 128)) for n in lengths.tolist()]
    assert Shortening().kept(jnp.asarray(lengths)).tolist() == wanted and wanted[-1] == 245
    assert Shortening(joint=BLANK).room(1_000_000) == 4 + 245 * 128 + 64 + 246 * 2


ROWS = Rows(
    (tuple(np.resize([5, 9, 2, 17, 33, 8, 4], 29).tolist()), (7, 7, 1), tuple(range(40, 75))),
    ("a", "b", "c"), ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0}), new_tokens=16,
)  # fmt: skip
SHORT = Rapid(chunk=4, least=8, question=3, sinks=1, joint=BLANK, similarity=0.0, expander=Chain(3))


@pytest.mark.slow
def test_drafts_are_those_of_the_short_text():
    """Every step's chain is what the model writes after the shortened prompt and all emitted tokens, read in one pass. The
    draft's text grows by what is emitted, whatever was rejected."""
    decoder = specjax.speculative(TARGET, SHORT)
    model, step = params("rapid"), jax.jit(decoder.step)
    state, rejected = start(decoder, ROWS, model=model), 0
    score = jax.jit(lambda tokens: TARGET(model["target"], _block(tokens), None, wants=Wants(logits=True)).logits)
    for _ in range(4):
        before = texts(state)
        state, info = step(model, state)
        for row in (0, 2):  # the greedy ones
            own = [*by_hand(SHORT._shortening, list(ROWS.prompts[row])), *before[row]]
            assert int(state.draft.model.length[row]) == len(own)
            assert int(state.draft.model.length[row] - state.draft.size[row]) == len(before[row])
            for token in info.tree.tokens[row, 1:].tolist():
                padded = jnp.asarray([[*own, *[0] * (60 - len(own))]])
                assert token == int(score(padded)[0, len(own) - 1].argmax())
                own.append(token)
            rejected += int(info.verdict.accepted[row]) < 3
    assert rejected


def _block(tokens):
    return Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32))


@pytest.mark.slow
def test_a_prompt_that_stays_whole_is_drafted_right():
    """Up to `least` tokens nothing is left out without a threshold, so that the target accepts all that it drafts. A model of
    its own, and a cache with room for few more tokens, change steps and never text."""
    whole = dataclasses.replace(SHORT, least=4096)
    got, state = complete(whole, ROWS)
    assert got == plain(ROWS) and state.stats.steps.tolist() == [4, 4, 4]
    for other in (SHORT, Rapid(DRAFT, 4, 8, question=3, expander=Chain(3))):
        got, state = complete(other, ROWS, model=params("draft-chain" if other.needs_params else "rapid"))
        assert got == plain(ROWS) and state.stats.steps.sum() > 12
    few, state = complete(dataclasses.replace(whole, least=32, new=1, joint=()), ROWS, model=params("rapid"))
    assert few == plain(ROWS) and state.stats.steps[2] > 4 and state.draft.model.length.max() <= 1 + 32 + 3 + 1


@pytest.mark.slow
def test_a_target_that_forgets_drafts_from_all_of_the_short_text():
    target = dataclasses.replace(TARGET, old=EMS(4, 4, budget=64), ahead=64)
    bound = SHORT.bind(target)
    assert bound.target.old is None and bound.target.ahead is None and not bound.needs_params
    decoder = specjax.speculative(target, dataclasses.replace(SHORT, least=4096))
    ours, theirs = (
        texts(decoding.run(own, params("rapid"), start(own, ROWS, model=params("rapid"))))
        for own in (decoder, specjax.speculative(target))
    )
    assert ours == theirs


def test_lines_and_what_it_refuses():
    drafter, own = build_drafter("rapid:chunk=16,question=8,length=7", Model(TARGET, {}))
    assert own is None and (drafter.chunk, drafter.question, drafter.joint, drafter.nodes) == (16, 8, (), 8)
    assert Rapid().expander.length == 10 and Rapid().expander.threshold == 0.1
    words = types.SimpleNamespace(encode=lambda text, **how: [len(line) for line in text.split("\n")])
    assert build_drafter("rapid", Model(TARGET, {}, words))[0].joint == (0, 0, 0)
    for bad in ({"chunk": 0}, {"question": 0}, {"least": 0}, {"sinks": -1}, {"similarity": -0.1}, {"new": 0}):
        with pytest.raises(ValueError, match="rapid needs chunk, least, shorten, question, new >= 1"):
            Rapid(**bad)
    with pytest.raises(ValueError, match="a Guided has two: name a draft model, as in rapid:model=FOLDER"):
        Rapid().bind(Guided(TARGET))
    with pytest.raises(ValueError, match=r"rapid: \(96,\), a blank line, is outside the target's 96 tokens"):
        Rapid(joint=(96,)).bind(TARGET)
    assert Rapid(DRAFT).bind(TARGET).needs_params
    with pytest.raises(ValueError, match="the draft model has 24 tokens and the target 96"):
        Rapid(SMALL).bind(TARGET)
