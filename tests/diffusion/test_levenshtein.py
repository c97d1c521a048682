"""Deleting and inserting: the block after a pass, budgets and repetitions by each rule, the model's tokens, refusals."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LM, MASK, V, begin, params, texts

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.decode.diffusion import usual_unmask
from specjax.diffusion import Dual, JointThreshold, Levenshtein, diffusion
from specjax.diffusion.unmask.base import Guess
from specjax.models import Masked

DELETE, SPLIT, M = 20, 21, MASK
POLICY = Levenshtein(delete_token_id=DELETE, split_token_id=SPLIT)


def guess(current, best, sure, prompt=0, step=0, opens=(), second=9):
    """Of one block; `sure` is the probability of the likeliest, and where the mask `opens` a position that of the mask."""
    current, best, sure = np.asarray(current), np.asarray(best), np.asarray(sure)
    width = len(current)
    dist = np.full((width, V), 1e-4)
    dist[:, second] = 1e-3
    dist[np.arange(width), best] = np.where(np.isin(np.arange(width), opens), 2e-3, sure)
    dist[list(opens), M] = sure[list(opens)]
    masked, own = current == M, np.arange(width) >= prompt
    row = lambda x: jnp.asarray(x)[None]
    return Guess(
        row(best), jnp.log(row(dist)), row(masked & own), row(~masked & own), jnp.asarray([step]), jnp.asarray([width]),
        jnp.zeros((1, width)), jnp.zeros((1,), bool), current=row(current), mask_id=M,
    )  # fmt: skip


def listed(written, old, original, prompt):
    """The published scan, as a loop over a list."""
    out, flags = [], []
    for i, token in enumerate(written):
        if i >= prompt and token == DELETE:
            continue
        split = i >= prompt and token == SPLIT
        out += [M, old[i]] if split else [token]
        flags += [False, original[i]] if split else [original[i]]
    width = len(written)
    return (out + [M] * width)[:width], (flags + [False] * width)[:width]


@pytest.mark.parametrize(("written", "block"), (([1, DELETE, 3, 4], [1, 3, 4, M]), ([1, SPLIT, 3, 4], [1, M, 2, 3])))
def test_one_position(written, block):
    got, _ = POLICY.moved(guess([1, 2, 3, 4], [0] * 4, [0.5] * 4), jnp.asarray([written]), jnp.zeros((1, 4), bool))
    assert got[0].tolist() == block


def test_the_scan_is_that_of_a_list():
    """Of random writes, after prompts of any length, whose tokens may be DELETE and SPLIT."""
    rng, crossed = np.random.default_rng(0), 0
    for prompt in (0, 1, 3, 7):
        for _ in range(20):
            old, written = rng.integers(0, 6, 8), rng.choice([1, 2, M, DELETE, SPLIT], 8)
            written[:prompt] = old[:prompt] = rng.choice([1, DELETE, SPLIT], prompt)
            original = (rng.random(8) < 0.5) & (np.arange(8) >= prompt)
            given = guess(old, [0] * 8, [0.5] * 8, prompt)
            got = POLICY.moved(given, jnp.asarray(written)[None], jnp.asarray(original)[None])
            want = listed(written.tolist(), old.tolist(), original.tolist(), prompt)
            assert [x[0].tolist() for x in got] == [want[0], want[1]]
            crossed += int((written[prompt:] == SPLIT).sum() > (written[prompt:] == DELETE).sum())
    assert crossed > 10  # tokens fell off the end


def test_nothing_moves_past_a_given_token():
    given = dataclasses.replace(
        guess([1, 2, 3, 4, 5], [0] * 5, [0.5] * 5), committed=jnp.asarray([[True, True, False, True, True]])
    )
    got, _ = POLICY.moved(given, jnp.asarray([[DELETE, 2, 3, SPLIT, 5]]), jnp.zeros((1, 5), bool))
    assert got[0].tolist() == [2, M, 3, M, 4]


def passed(policy, current, passes, prompt=0):
    """Passes over a block, each with its predictions: the blocks after each, and whether it is read again."""
    memory, blocks, stays = policy.init(1, len(current), V), [], []
    for step, (best, sure, *opens) in enumerate(passes):
        choice, memory = policy(guess(current, best, sure, prompt, step, *opens), memory)
        write = np.asarray(choice.commit | choice.edit)[0]
        current = np.where(write, choice.tokens[0], np.where(choice.reopen[0], M, current)).tolist()
        blocks.append(current)
        stays.append(bool(choice.stay[0]) or M in current)
    return blocks, stays, memory


@pytest.mark.slow
def test_an_open_original_gives_the_budget_back_to_one_rule():
    """SPLIT brings an original position back: `reference` counts anew, `served` goes on."""
    passes = [
        ([1, SPLIT], [0.9, 0.9]),  # of an open position: its mask stays original, behind a new one
        ([1, 2], [0.9, 0.9]),
        ([1, 2], [0.9, 0.9]),
    ]
    for rule, post in (("reference", [0, 1, 2]), ("served", [0, 1, 2])):
        policy = dataclasses.replace(POLICY, rule=rule, max_post_steps=5)
        found = [int(passed(policy, [M, M], passes[: n + 1])[2].post[0]) for n in range(3)]
        assert found == post
    again = Levenshtein(max_post_steps=5, delete_token_id=DELETE, split_token_id=SPLIT)
    for rule, post in (("reference", 0), ("served", 3)):
        policy = dataclasses.replace(again, rule=rule)
        given = guess([M, 1], [2, 1], [0.1, 0.9], step=4)
        memory = dataclasses.replace(
            policy.init(1, 2, V), original=jnp.asarray([[True, False]]), count=jnp.asarray([1]), post=jnp.asarray([3])
        )
        assert int(policy(given, memory)[1].post[0]) == post


@pytest.mark.parametrize("rule", ("reference", "served"))
def test_the_last_pass_fills_the_block_and_moves_nothing(rule):
    """Two passes after the originals; the second would delete, and takes the second likeliest token."""
    policy = dataclasses.replace(POLICY, rule=rule, max_post_steps=2)
    passes = [([1, 2], [0.9, 0.9]), ([DELETE, 3], [0.9, 0.9]), ([DELETE, SPLIT], [0.9, 0.9])]
    blocks, stays, _ = passed(policy, [M, M], passes)
    assert blocks == [[1, 2], [3, M], [9, 9]] and stays == [True, True, False]
    at_once, stays, _ = passed(dataclasses.replace(policy, max_post_steps=0), [M, M], [([DELETE, 2], [0.9, 0.8])])
    assert at_once == [[9, 2]] and stays == [False]


def test_a_schedule_asks_for_the_surest():
    """One of two in each of the first passes; a pass that changes nothing ends the block."""
    policy = dataclasses.replace(POLICY, steps=3)
    blocks, stays, _ = passed(policy, [M, M], [([1, 2], [0.3, 0.4])] * 3)
    assert blocks == [[M, 2], [1, 2], [1, 2]] and stays == [True, True, False]
    at_once, _, _ = passed(dataclasses.replace(policy, steps=1), [M, M], [([1, 2], [0.3, 0.4])])
    assert at_once == [[1, 2]]


@pytest.mark.parametrize("rule", ("reference", "served"))
def test_a_block_that_comes_again_is_changed(rule):
    """Two tokens that take turns: the position writes another one, the second likeliest."""
    policy = dataclasses.replace(POLICY, rule=rule)
    turns = [([1], [0.9]), ([2], [0.9]), ([1], [0.9]), ([2], [0.9])]
    blocks, _, _ = passed(policy, [M], turns)
    assert [block[0] for block in blocks] == {"reference": [1, 2, 9, 9], "served": [1, 2, 1, 9]}[rule]


def test_a_predicted_mask_opens_what_is_known():
    """In `served`; an original position takes the best other token, with its own probability."""
    policy = dataclasses.replace(POLICY, rule="served")
    assert policy.sees_mask and not POLICY.sees_mask
    blocks, _, _ = passed(policy, [M, M], [([1, 2], [0.9, 0.9], [0]), ([1, 2], [0.9, 0.9], [1])])
    assert blocks == [[M, 2], [1, M]]


@pytest.mark.slow
def test_it_moves_tokens_of_a_canvas_too():
    """With whole canvases, and rows whose prompts have open spans: given tokens stay, and every text is filled."""
    policy = dataclasses.replace(POLICY, max_post_steps=3, max_steps_per_block=20)
    decoder = diffusion(LM, MASK, policy, block_length=8)
    got = texts(specjax.run(decoder, params(), begin(decoder)))
    assert not any({MASK, DELETE, SPLIT} & set(text) for text in got)
    assert got[3][0] == 5 and got[3][3:6] == [8, 9, 7] and got[3][7] == 2


def test_the_models_tokens():
    model = models.Model(LM, params()["target"], masked=Masked(MASK, shift=False, block=8))
    with pytest.raises(ValueError, match=r"names no such tokens .*: name them in the line, or take joint_threshold"):
        Diffusion("levenshtein").bind(model)
    own = dataclasses.replace(model, masked=Masked(MASK, shift=False, block=8, delete_id=DELETE, split_id=SPLIT))
    assert usual_unmask(own) == "levenshtein" and usual_unmask(model) != "levenshtein"
    assert Diffusion().bind(own)[0].policy == POLICY
    line = "levenshtein:delete_token_id=3,split_token_id=4"
    assert Diffusion(line).bind(own)[0].policy == Levenshtein(delete_token_id=3, split_token_id=4)


@pytest.mark.parametrize(
    ("fields", "said"),
    (
        ({"rule": "fast"}, "levenshtein has the rules reference and served, not 'fast'"),
        ({"threshold": -0.1}, "needs thresholds and max_post_steps >= 0"),
        ({"max_post_steps": -1}, "needs thresholds and max_post_steps >= 0"),
        ({"rule": "served", "steps": 4}, "steps is of rule=reference: leave it out, or take that rule"),
        ({"rule": "served", "max_steps_per_block": 4}, "max_steps_per_block is of rule=reference"),
        ({"steps": 0}, "needs steps >= 1, got 0"),
        ({"max_steps_per_block": 1}, "needs max_steps_per_block >= 2, got 1"),
        ({"delete_token_id": 4}, "two different ids, or neither of them; got 4 and -1"),
        ({"delete_token_id": 4, "split_token_id": 4}, "two different ids"),
    ),
)
def test_what_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Levenshtein(**fields)


def test_a_cache_is_refused():
    with pytest.raises(ValueError, match="needs predictions for known tokens too"):
        diffusion(LM, MASK, POLICY, Dual(), block_length=8)


@pytest.mark.slow
def test_without_these_tokens_it_edits():
    """As `joint_threshold` does, where both write by the threshold and no block comes again."""
    kinds = Levenshtein(0.4, 1.0, 4), JointThreshold(0.4, 1.0, 4)
    decoders = [diffusion(LM, MASK, kind, block_length=8, causal_blocks=True) for kind in kinds]
    got, plain = (specjax.run(decoder, params(), begin(decoder, (0, 1, 2))) for decoder in decoders)
    assert texts(got) == texts(plain) and got.stats.steps.tolist() == plain.stats.steps.tolist()
