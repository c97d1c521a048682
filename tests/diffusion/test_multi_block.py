"""Several blocks at once, and attention by blocks, beside loops that read everything in every pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, L, begin, params, texts

import specjax
from specjax import decoder as decoding
from specjax.diffusion import BlockCausal, Fixed, Klass, MultiBlock, RunningConfidence, SlowFast, Threshold, diffusion
from specjax.lm import Block, Wants
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.state import Finish

BLOCK = 4


@jax.jit
def forward(tokens, groups):
    """Logits `[L, V]` of a whole canvas whose positions see lower groups; nothing sees group `L`."""
    own = jnp.arange(L)
    visible = ((groups[None] <= groups[:, None]) & (groups[None] < L) | (own[None] == own[:, None]))[None]
    block = Block(tokens[None], own[None], jnp.zeros(1, int), visible, causal=False)
    return LM(params()["target"], block, None, wants=Wants(logits=True)).logits[0]


def read(canvas, groups):
    """Probabilities `[L, V]` without the mask, in float64."""
    more = L - len(canvas)
    padded = jnp.asarray([*canvas, *[MASK] * more]), jnp.asarray([*groups, *[L] * more])
    logits = np.array(forward(*padded), np.float64)[: len(canvas)]
    logits[:, MASK] = -np.inf
    dist = np.exp(logits - logits.max(axis=1, keepdims=True))
    return dist / dist.sum(axis=1, keepdims=True)


def canvas_of(row, causal):
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    begin = canvas.index(MASK)
    blocks = [list(range(i, min(i + BLOCK, len(canvas)))) for i in range(begin, len(canvas), BLOCK)]
    groups = [max((i - begin) // BLOCK, -1) if causal else 0 for i in range(len(canvas))]
    return canvas, blocks, groups


def loop(row, policy, causal):
    """A row's text and passes."""
    canvas, blocks, groups = canvas_of(row, causal)
    totals = [sum(canvas[i] == MASK for i in block) for block in blocks]
    share = lambda k: 1 - sum(canvas[i] == MASK for i in blocks[k]) / max(totals[k], 1)
    count, passes = 1, 0
    while MASK in canvas:
        if passes and count < len(blocks) and share(count - 1) >= policy.add:
            count += 1
        dist, passes = read(canvas, groups), passes + 1
        may = [[i for i in block if canvas[i] == MASK] for block in blocks[:count]]
        if policy.entropy:
            entropy = -(dist * np.log(np.where(dist > 0, dist, 1))).sum(axis=1)
            every = [i for block in may for i in block]
            chosen = {i for i in every if entropy[i] <= policy.entropy} | {min(every, key=lambda i: (entropy[i], i))}
            first = next(block for block in may if block)
            forced, worth = [first], -entropy
        else:
            worth = dist.max(axis=1)
            chosen = {i for block in may for i in block if worth[i] > policy.threshold}
            forced = [block for k, block in enumerate(may) if block and (k == 0 or share(k - 1) >= policy.complete)]
        chosen |= {max(block, key=lambda i: (worth[i], -i)) for block in forced if not chosen & set(block)}
        for i in chosen:
            canvas[i] = int(dist[i].argmax())
    return canvas, passes


def make(policy, cache=None, **fields):
    return diffusion(LM, MASK, policy, cache, block_length=BLOCK, **fields)


@pytest.mark.parametrize(
    ("policy", "causal", "growth"),
    [
        (MultiBlock(0.35, 0.25, 0.75), True, 0),
        pytest.param(MultiBlock(0.35, 0.25, 0.75), True, 2, marks=pytest.mark.slow),
        pytest.param(MultiBlock(0.5, 0.5, 1.0), True, 2, marks=pytest.mark.slow),
        pytest.param(MultiBlock(0.3, 0.25, 0.5), False, 2, marks=pytest.mark.slow),
        (MultiBlock(add=0.25, entropy=1.2), False, 2),
        pytest.param(MultiBlock(add=0.5, entropy=0.8), True, 2, marks=pytest.mark.slow),
    ],
    ids=["d2f", "d2f-parts", "d2f-late", "d2f-whole", "d3llm", "d3llm-causal"],
)
def test_equal_to_a_loop_over_whole_passes(policy, causal, growth):
    decoder = dataclasses.replace(make(policy, BlockCausal() if causal else None), growth=growth)
    state = specjax.run(decoder, params(), begin(decoder))
    found = list(zip(texts(state), state.stats.steps.tolist(), strict=True))
    assert found == [loop(row, policy, causal) for row in range(4)]


GAPS = ([3, 1, 4], [3, 1, 4, MASK, MASK, *range(1, 17), MASK, MASK, 5, MASK])
"""Prompts; the second has open spans, with so much known text between them that the active block jumps over some."""


def with_gaps(decoder):
    size = max(map(len, GAPS))
    tokens = jnp.asarray([[*prompt, *[0] * (size - len(prompt))] for prompt in GAPS])
    lengths = jnp.asarray([len(prompt) for prompt in GAPS])
    prompts = Prompts(
        tokens, lengths, row_keys(0, "ab"), jnp.asarray([17, 29]), SamplingArrays.make(2, temperature=0.0)
    )
    state = decoding.empty(decoder, params(), 2, L, None, 1, form=prompts.sampling.form)
    return decoding.insert(decoder, params(), state, jnp.arange(2), prompts)


@pytest.mark.parametrize(
    "policy",
    [Fixed(), Threshold(0.3), RunningConfidence(), Klass(0.2, 3.0, 1), SlowFast(), MultiBlock(0.35, 0.25, 0.75)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.slow
def test_what_attention_by_blocks_reuses_is_exact(policy):
    """Every pass's logits, where they are read, are those of a whole pass with the same attention."""
    decoder = make(policy, BlockCausal())
    state = with_gaps(decoder)
    read = jax.jit(lambda state: decoder._read(params(), state, *decoder._active(state))[0])
    step = jax.jit(lambda state: decoder.step(params(), state)[0])
    anew = lambda state: dataclasses.replace(state, stats=jax.tree.map(jnp.zeros_like, state.stats))  # a first pass
    whole = jax.jit(lambda state: decoder._read(params(), anew(state), *decoder._active(state))[0])
    for _ in range(40):
        live, masked = np.asarray(~state.done), np.asarray(decoder._active(state)[1])
        if not live.any():
            break
        ours, fresh = np.asarray(read(state)), np.asarray(whole(state))
        np.testing.assert_allclose(ours[masked], fresh[masked], rtol=1e-4, atol=1e-4)
        state = step(state)
    assert state.done.all()


def test_a_pass_leaves_out_blocks_that_are_not_open():
    decoder = dataclasses.replace(make(MultiBlock(threshold=1.0, add=1.0), BlockCausal()), growth=0)
    state = jax.jit(lambda state: decoder.step(params(), state)[0])(begin(decoder))
    active, _ = decoder._asked(state, *(x for x in decoder._masked(state)))
    for row in range(3):
        at = len(PROMPTS[row])
        assert np.flatnonzero(active[row]).tolist() == list(range(at, at + BLOCK))


@pytest.mark.parametrize(
    "policy", [MultiBlock(add=0.25, entropy=1.2), Klass(0.2, 3.0, 1)], ids=["multi_block", "klass"]
)
def test_a_text_ends_before_later_blocks_are_finished(policy):
    decoder = make(policy)
    whole = specjax.run(decoder, params(), begin(decoder))
    eos = texts(whole)[1][len(PROMPTS[1]) + 2]
    cut = specjax.run(decoder, params(), begin(decoder, eos=eos))
    end = texts(whole)[1].index(eos, len(PROMPTS[1])) + 1
    assert texts(cut)[1] == texts(whole)[1][:end] and cut.finish[1] == Finish.EOS
    assert cut.stats.steps[1] < whole.stats.steps[1]


@pytest.mark.parametrize(
    ("make_one", "why"),
    [
        (lambda: MultiBlock(add=0.0), "multi_block needs threshold >= 0, add and complete in"),
        (lambda: MultiBlock(entropy=-1.0), "entropy >= 0"),
        (
            lambda: make(MultiBlock(), causal_blocks=True),
            "MultiBlock opens blocks ahead, and a pass of a block-diffusion",
        ),
    ],
    ids=["add", "entropy", "blocks"],
)
def test_wrong_values(make_one, why):
    with pytest.raises(ValueError, match=why):
        make_one()
