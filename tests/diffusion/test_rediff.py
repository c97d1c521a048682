"""Refining while unmasking, against a loop over whole passes: tokens and passes; what is refused."""

import math

import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, forward, params, texts

import specjax
from specjax.diffusion import Dual, Fixed, ReDiff, diffusion

W = 8


def wanted(row, policy):
    """The text, its passes, and how many tokens were written over: the published loop."""
    text = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    given = [token != MASK for token in text]
    low, passes, edited = text.index(MASK), 0, 0
    while low < len(text):
        block = range(low, min(low + W, len(text)))
        total = sum(text[at] == MASK for at in block)
        steps = policy.steps or total
        schedule = [total // steps + (i < total % steps) for i in range(steps)]
        for i in range(steps):
            opened = [at for at in block if text[at] == MASK]
            if not opened:
                break
            dist = np.asarray(forward(text), np.float64)
            dist[:, MASK] = -np.inf
            dist = np.exp(dist - dist.max(axis=1, keepdims=True))
            dist /= dist.sum(axis=1, keepdims=True)
            sure, best, passes = dist.max(axis=1), dist.argmax(axis=1), passes + 1
            known = sorted((at for at in block if at not in opened and not given[at]), key=lambda at: -sure[at])
            share = int(len(known) * policy.revise_topk) if policy.revise_topk else len(known)
            again = known[:share] if i >= steps - math.ceil(steps * policy.revise_start) else []
            edited += sum(text[at] != best[at] for at in again)
            for at in (*sorted(opened, key=lambda at: -sure[at])[: max(schedule[i], 1)], *again):
                text[at] = int(best[at])
        low += W
    return text, passes, edited


@pytest.mark.parametrize(
    "policy",
    (
        ReDiff(),
        ReDiff(4, 0.5),
        pytest.param(ReDiff(revise_start=0.5), marks=pytest.mark.slow),
        pytest.param(ReDiff(3, 0.4, 0.7), marks=pytest.mark.slow),
    ),
)
def test_equal_to_a_loop_over_whole_passes(policy):
    decoder = diffusion(LM, MASK, policy, block_length=W)
    state = specjax.run(decoder, params(), begin(decoder))
    edited = 0
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        want = wanted(row, policy)
        assert (text, steps) == want[:2]
        edited += want[2]
    assert edited > 0


@pytest.mark.slow
def test_without_rewriting_it_is_fixed():
    decoders = [diffusion(LM, MASK, kind, block_length=W) for kind in (ReDiff(4, revise_start=0.0), Fixed(4))]
    got, plain = (specjax.run(decoder, params(), begin(decoder)) for decoder in decoders)
    assert texts(got) == texts(plain) and got.stats.steps.tolist() == plain.stats.steps.tolist()


def test_bad_fields_and_caches_that_keep_what_changes():
    for fields in ({"steps": -1}, {"revise_topk": 1.5}, {"revise_start": -0.1}):
        with pytest.raises(ValueError, match="rediff needs steps >= 0, and revise_topk and revise_start in"):
            ReDiff(**fields)
    with pytest.raises(ValueError, match="cache none"):
        diffusion(LM, MASK, ReDiff(), cache=Dual(), block_length=W)
