"""Editing, block by block, against a loop over whole passes: tokens and passes; when a block is final; what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax.assembly.registry import make_unmask
from specjax.diffusion import Dual, JointThreshold, Threshold, diffusion
from specjax.diffusion.unmask.base import Guess
from specjax.lm import Block, Wants

V, W = 24, 8


@functools.cache
def _forward(size, causal):
    """Logits of one pass over a text; by blocks, or with everything in view."""
    of = jnp.arange(size) // W
    visible = (of[None, :] <= of[:, None])[None] if causal else None
    block = lambda tokens: Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, int), visible, causal=False)
    return jax.jit(lambda tokens: LM(params()["target"], block(tokens), None, wants=Wants(logits=True)).logits[0])


def wanted(row, causal, policy):
    """The text, its passes with those that only store, and how many tokens were edited."""
    text = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    given = [token != MASK for token in text]
    first, passes, edited = text.index(MASK), 0, 0
    low = first // W * W if causal else first
    while low < len(text):
        block, post, stored = range(low, min(low + W, len(text))), 0, False
        while True:
            opened = [at for at in block if text[at] == MASK]
            post += not opened
            if post > policy.max_post_steps or not any(not given[at] for at in block):
                break
            canvas = [*text[: low + W], *[MASK] * (low + W - len(text))] if causal else text
            dist = np.asarray(_forward(len(canvas), causal)(jnp.asarray(canvas)), np.float64)
            dist[:, MASK] = -np.inf
            dist = np.exp(dist - dist.max(axis=1, keepdims=True))
            dist /= dist.sum(axis=1, keepdims=True)
            sure, best, passes = dist.max(axis=1), dist.argmax(axis=1), passes + 1
            write = [at for at in opened if sure[at] > policy.threshold]
            write = write or sorted(opened, key=lambda at: -sure[at])[:1]
            known = [at for at in block if not given[at] and text[at] != MASK]
            edit = [at for at in known if text[at] != best[at] and sure[at] > policy.editing_threshold]
            for at in (*write, *edit):
                text[at] = int(best[at])
            edited += len(edit)
            if not opened and not edit:
                stored = True  # by this pass, which saw its last tokens
                break
        low += W
        passes += causal and low < len(text) and not stored  # but for the last one
    return text, passes, edited


@pytest.mark.parametrize(
    ("causal", "policy"),
    (
        (True, JointThreshold(0.4, 0.0, 4)),
        (False, JointThreshold(0.4, 0.3, 3)),
        pytest.param(True, JointThreshold(0.5, 0.5, 16), marks=pytest.mark.slow),
        pytest.param(True, JointThreshold(0.4, 0.0, 0), marks=pytest.mark.slow),
        pytest.param(False, JointThreshold(0.6, 0.0, 16), marks=pytest.mark.slow),
    ),
)
def test_equal_to_a_loop_over_whole_passes(causal, policy):
    decoder = diffusion(LM, MASK, policy, block_length=W, causal_blocks=causal)
    state = specjax.run(decoder, params(), begin(decoder))
    edited = 0
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        want = wanted(row, causal, policy)
        assert (text, steps) == want[:2]
        edited += want[2]
    assert edited > 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", (False, True))
def test_without_edits_it_is_a_threshold(causal):
    kinds = JointThreshold(0.4, 1.0, 0), Threshold(0.4)
    decoders = [diffusion(LM, MASK, kind, block_length=W, causal_blocks=causal) for kind in kinds]
    got, plain = (specjax.run(decoder, params(), begin(decoder)) for decoder in decoders)
    assert texts(got) == texts(plain) and got.stats.steps.tolist() == plain.stats.steps.tolist()


def guess(current, best, sure):
    """Of a block in which position 0 is the prompt's, and mask ids are open; `sure` is the probability of the likeliest."""
    current, best = jnp.asarray([current]), jnp.asarray([best])
    dist = jnp.where(jax.nn.one_hot(best, V) > 0, jnp.asarray([sure])[..., None], 1e-3)
    masked, flags = current == MASK, jnp.zeros((1,), bool)
    committed = ~masked & (jnp.arange(current.shape[1]) > 0)[None]
    zero = jnp.zeros((1,), jnp.int32)
    return Guess(best, jnp.log(dist), masked, committed, zero, zero, jnp.zeros(best.shape), flags, current=current)


def test_each_threshold_has_its_positions():
    policy = JointThreshold(0.6, 0.4)
    choice, _ = policy(
        guess([1, 2, 2, 2, MASK, MASK], [3, 3, 3, 2, 3, 3], [0.9, 0.5, 0.3, 0.9, 0.7, 0.5]), jnp.zeros(1, int)
    )
    assert choice.edit[0].tolist() == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]  # the prompt's and what is said anew stay
    assert choice.commit[0].tolist() == [False] * 4 + [True, False] and bool(choice.stay[0])


@pytest.mark.parametrize(("count", "want"), ((1, [2]), (2, [2, 3]), (3, [2, 3, 4]), (9, [2, 3, 4, 5])))
def test_never_fewer_than_asked_for(count, want):
    """Of four open positions one is sure: the surest are committed besides, as many as there are."""
    policy = JointThreshold(0.6, 1.0, num_to_transfer=count)
    choice, _ = policy(guess([1, 2, *[MASK] * 4], [3] * 6, [0.9, 0.5, 0.7, 0.5, 0.4, 0.3]), jnp.zeros(1, int))
    assert np.flatnonzero(choice.commit[0]).tolist() == want


def test_all_that_is_sure_where_that_is_enough():
    policy = JointThreshold(0.6, 1.0, num_to_transfer=2)
    choice, _ = policy(guess([1, 2, *[MASK] * 4], [3] * 6, [0.9, 0.5, 0.7, 0.5, 0.8, 0.9]), jnp.zeros(1, int))
    assert np.flatnonzero(choice.commit[0]).tolist() == [2, 4, 5]


def test_a_block_whose_tokens_take_turns_ends():
    """Two tokens that replace each other for ever: the count of passes without open positions ends it."""
    policy, memory, tokens = JointThreshold(0.5, 0.0, max_post_steps=3), jnp.zeros((1,), jnp.int32), [1, 2]
    stays = []
    for _ in range(3):
        choice, memory = policy(guess(tokens, [1, 5 - tokens[1]], [0.9, 0.9]), memory)
        assert choice.edit[0].tolist() == [False, True]
        tokens = [1, 5 - tokens[1]]
        stays.append(bool(choice.stay[0]))
    assert stays == [True, True, False]
    quiet, _ = policy(guess([1, 2], [1, 2], [0.9, 0.9]), jnp.zeros((1,), jnp.int32))
    assert not bool(quiet.stay[0])


def test_a_token_like_the_one_before_it_is_less_likely():
    """At all but the block's first position, whether that token is the prompt's, a new one or a mask's."""
    policy, plain = JointThreshold(0.6, 0.6, penalty_lambda=3.0), JointThreshold(0.6, 0.6)
    given = guess([3, 2, 3, MASK, MASK], [3, 3, 4, 3, 5], [0.9] * 5)
    got, _ = policy(given, jnp.zeros(1, int))
    without = np.asarray(given.log_probs, np.float64)[0]
    for at, beside in enumerate([None, 3, 2, 3, MASK]):
        own = without[at] - (np.arange(V) == beside) * 3.0
        assert int(got.tokens[0, at]) == own.argmax()
        np.testing.assert_allclose(got.score[0, at], np.exp(own.max()) / np.exp(own).sum(), rtol=1e-4)
    assert plain(given, jnp.zeros(1, int))[0].tokens[0, 1] == 3
    high = JointThreshold(0.6, 0.6, penalty_lambda=9.0)(given, jnp.zeros(1, int))[0]
    assert int(high.tokens[0, 3]) != 3


def test_the_reports_thresholds_are_one_word_away():
    assert make_unmask("joint_threshold:preset=paper") == JointThreshold(0.7, 0.5)
    assert make_unmask("joint_threshold:preset=paper,threshold=0.6") == JointThreshold(0.6, 0.5)
    assert make_unmask("joint_threshold") == JointThreshold(0.5, 0.0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="which a cache leaves out: choose the cache none"):
        diffusion(LM, MASK, JointThreshold(), Dual(), block_length=W)
    with pytest.raises(ValueError, match="needs thresholds and max_post_steps >= 0"):
        JointThreshold(max_post_steps=-1)
    with pytest.raises(ValueError, match="penalty_lambda >= 0, got -1"):
        JointThreshold(penalty_lambda=-1)
    with pytest.raises(ValueError, match="num_to_transfer >= 1, got 0"):
        JointThreshold(num_to_transfer=0)
