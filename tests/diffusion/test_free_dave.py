"""FreeDave writes static decoding's text, in fewer passes."""

import numpy as np
import pytest
from support.small_diffusion import LM, MASK, begin, make, params, texts

import specjax
from specjax.diffusion import Dual, Fixed, FreeDave, diffusion
from specjax.state import Finish


def both(drafts, policy, block_length=8, shift=False, **settings):
    static = make(policy, block_length, shift)
    ours = make(FreeDave(policy.steps, policy.rule, drafts), block_length, shift)
    return [specjax.run(decoder, params(), begin(decoder, **settings)) for decoder in (ours, static)]


@pytest.mark.parametrize(
    ("drafts", "policy", "block_length", "shift"),
    (
        (4, Fixed(), 8, False),
        (2, Fixed(), 8, True),
        (3, Fixed(3), 8, False),
        pytest.param(4, Fixed(rule="random"), 8, False, marks=pytest.mark.slow),
        pytest.param(1, Fixed(), 8, False, marks=pytest.mark.slow),
        pytest.param(8, Fixed(), 5, True, marks=pytest.mark.slow),
        pytest.param(4, Fixed(rule="entropy"), 16, False, marks=pytest.mark.slow),
    ),
    ids=str,
)
def test_the_text_of_static_decoding_in_no_more_passes(drafts, policy, block_length, shift):
    ours, static = both(drafts, policy, block_length, shift)
    assert texts(ours) == texts(static) and ours.finish.tolist() == static.finish.tolist()
    assert all(a <= b for a, b in zip(ours.stats.steps.tolist(), static.stats.steps.tolist(), strict=True))
    if drafts > 1 and policy.rule == "low_confidence":
        assert ours.stats.steps.sum() < static.stats.steps.sum()
    if drafts == 1:
        assert ours.stats.steps.tolist() == static.stats.steps.tolist()


def test_drawn_texts_are_static_decodings_too():
    ours, static = both(4, Fixed(), temperature=1.0)
    assert texts(ours) == texts(static)


def test_eos_ends_the_same_text():
    eos = texts(both(4, Fixed())[1])[0][6]
    ours, static = both(4, Fixed(), eos=eos)
    assert texts(ours) == texts(static) and Finish.EOS in ours.finish.tolist()


def test_rows_do_not_see_each_other():
    decoder = make(FreeDave())
    together = specjax.run(decoder, params(), begin(decoder))
    alone = [specjax.run(decoder, params(), begin(decoder, [row])) for row in range(4)]
    assert [texts(state)[0] for state in alone] == texts(together)
    np.testing.assert_array_equal([int(s.stats.steps[0]) for s in alone], together.stats.steps)


def test_bad_settings():
    with pytest.raises(ValueError, match="drafts must be at least 1"):
        FreeDave(drafts=0)
    with pytest.raises(ValueError, match="neither a cache nor guidance"):
        diffusion(LM, MASK, FreeDave(), Dual())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        diffusion(LM, 99, FreeDave())
