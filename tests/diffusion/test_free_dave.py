"""FreeDave writes static decoding's text, in fewer passes."""

import numpy as np
import pytest
from support import small_diffusion
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, make, params, texts

import specjax
from specjax.diffusion import Dual, Fixed, FreeDave, Prefix, diffusion, free_dave
from specjax.diffusion.partial_pass import read_drafts
from specjax.state import Finish


def both(drafts, policy, block_length=8, shift=False, parts=(), **settings):
    """Ours and static decoding, run to the end; `parts` are more arguments of `diffusion`."""
    make = lambda policy: diffusion(LM, MASK, policy, block_length=block_length, shift=shift, **dict(parts))
    decoders = make(FreeDave(policy.steps, policy.rule, drafts)), make(policy)
    return [specjax.run(decoder, params(), begin(decoder, **settings)) for decoder in decoders]


DUAL, PREFIX, BLOCKS = {"cache": Dual()}, {"cache": Prefix()}, {"causal_blocks": True}


@pytest.mark.parametrize(
    ("drafts", "policy", "block_length", "shift", "parts"),
    (
        (4, Fixed(), 8, False, {}),
        (3, Fixed(), 8, True, DUAL),
        (4, Fixed(), 8, False, BLOCKS),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (3, Fixed(3), 8, False, {}),
                (4, Fixed(rule="random"), 8, False, {}),
                (1, Fixed(), 8, False, {}),
                (8, Fixed(), 5, True, {}),
                (4, Fixed(rule="entropy"), 16, False, {}),
                (4, Fixed(rule="order"), 8, False, PREFIX),
                (2, Fixed(3), 8, True, PREFIX),
                (2, Fixed(3), 8, True, {**BLOCKS, "sub_block": 4}),
            )
        ),
    ),
    ids=str,
)
def test_the_text_of_static_decoding_in_no_more_passes(drafts, policy, block_length, shift, parts):
    ours, static = both(drafts, policy, block_length, shift, parts)
    assert texts(ours) == texts(static) and ours.finish.tolist() == static.finish.tolist()
    assert all(a <= b for a, b in zip(ours.stats.steps.tolist(), static.stats.steps.tolist(), strict=True))
    if drafts > 1 and policy.rule == "low_confidence":
        assert ours.stats.steps.sum() < static.stats.steps.sum()
    if drafts == 1:
        assert ours.stats.steps.tolist() == static.stats.steps.tolist()


def test_a_canvas_that_begins_open(monkeypatch):
    """No feature lies before its first position; every other one is still said by the one before it."""
    monkeypatch.setattr(small_diffusion, "PROMPTS", [[MASK, *prompt[1:]] for prompt in small_diffusion.PROMPTS])
    ours, static = both(3, Fixed(), 8, True, DUAL)
    assert texts(ours) == texts(static) and ours.tokens[:, 0].tolist() == static.tokens[:, 0].tolist()


def test_eos_ends_the_same_text():
    eos = texts(both(4, Fixed())[1])[0][6]
    ours, static = both(4, Fixed(), eos=eos)
    assert texts(ours) == texts(static) and Finish.EOS in ours.finish.tolist()


@pytest.mark.slow
def test_rows_do_not_see_each_other():
    decoder = make(FreeDave())
    together = specjax.run(decoder, params(), begin(decoder))
    alone = [specjax.run(decoder, params(), begin(decoder, [row])) for row in range(4)]
    assert [texts(state)[0] for state in alone] == texts(together)
    np.testing.assert_array_equal([int(s.stats.steps[0]) for s in alone], together.stats.steps)


def test_bad_settings():
    with pytest.raises(ValueError, match="drafts must be at least 1"):
        FreeDave(drafts=0)
    with pytest.raises(ValueError, match="choose the cache none, or prefix or dual without refresh"):
        diffusion(LM, MASK, FreeDave(), Dual(2))
    with pytest.raises(ValueError, match="takes no guidance"):
        diffusion(LM, MASK, FreeDave(), cfg_scale=1.0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        diffusion(LM, 99, FreeDave())


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "most"), ((DUAL, 32), (PREFIX, 96)), ids=("dual", "prefix"))
def test_passes_are_no_wider_than_a_cache_can_ask_for(monkeypatch, cache, most):
    """Canvases of 32, three drafts: `dual` never reads more than a canvas, as three blocks and their neighbours are less."""
    sizes = set()
    reading = lambda *given: sizes.add(given[7]) or read_drafts(*given)
    monkeypatch.setattr(free_dave, "read_drafts", reading)
    ours, static = both(3, Fixed(), 8, False, cache)
    assert texts(ours) == texts(static)
    (found,) = sizes
    assert ours.tokens.shape[1] == 32 and max(found) == most == found[-1]


@pytest.mark.slow
def test_eager_passes_are_counted_in_full():
    """A pass may write more than a block."""
    decoder = diffusion(LM, MASK, FreeDave(4, drafts=2, eager=True), block_length=4)
    state = specjax.run(decoder, params(), begin(decoder))
    counted = np.asarray(state.stats.accepted)
    assert counted.shape[1] == decoder.span + 1 == 9
    assert (counted * np.arange(9)).sum(axis=1).tolist() == [
        limit - len(prompt) + prompt.count(MASK) for limit, prompt in zip(LIMITS, PROMPTS, strict=True)
    ]
