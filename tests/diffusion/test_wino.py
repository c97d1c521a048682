"""WINO against a plain loop, its bound on passes, and its two ends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, L, begin, make, params, texts

import specjax
from specjax.diffusion import Fixed, Prefix, Wino, diffusion
from specjax.lm import Block, Wants

WINO = Wino(0.3, 0.5, 0.7, 2, 4)


@functools.cache
def _pass(size, width):
    def read(tokens, positions, visible):
        block = Block(tokens[None], positions[None], jnp.zeros(1, int), visible[None], causal=False)
        return LM(params()["target"], block, None, wants=Wants(logits=True)).logits[0]

    return jax.jit(read)


def read(canvas, block):
    """Logits of the canvas, and of the block's shadows: masks that see all but their own twins."""
    size, width = len(canvas), len(block)
    tokens = [*canvas, *[MASK] * width]
    visible = np.ones((size + width, size + width), bool)
    visible[:size, size:] = False
    for i, at in enumerate(block):
        visible[size + i, at] = False
    positions = jnp.asarray([*range(size), *block])
    logits = np.array(_pass(size, width)(jnp.asarray(tokens), positions, jnp.asarray(visible)), np.float64)
    logits[:, MASK] = -np.inf
    dist = np.exp(logits - logits.max(axis=1, keepdims=True))
    dist /= dist.sum(axis=1, keepdims=True)
    return dist[:size], dist[size:]


def slow(canvas, block_length, policy):
    """Plain Python: the text, the passes, and how many positions were open after each pass, block by block."""
    canvas, passes, open_after = list(canvas), 0, []
    for low in range(canvas.index(MASK), len(canvas), block_length):
        block = range(low, min(low + block_length, len(canvas)))
        opened = {at for at in block if canvas[at] == MASK}
        last, counts = 30, [len(opened)]
        while masks := [at for at in block if canvas[at] == MASK]:
            dist, shadow = read(canvas, block)
            token = {at: int(dist[at].argmax()) for at in masks}
            sure = [at for at in masks if dist[at].max() > policy.threshold]
            cap = min(max(int(policy.share * len(masks) + 1e-9), policy.fewest), policy.most)
            best = sorted(masks, key=lambda at, dist=dist: (-dist[at].max(), at))
            chosen = [at for at in best if at in sure][:cap] or best[:1]
            doubted = []
            if len(chosen) > 1:
                again = {at: shadow[at - low][canvas[at]] for at in opened - set(masks)}
                doubted = sorted((at for at in again if again[at] < policy.back), key=lambda at: (again[at], at))
                if len(doubted) >= last:
                    doubted = doubted[: last - 1]
            for at in chosen:
                canvas[at] = token[at]
            for at in doubted:
                canvas[at] = MASK
            last, passes = len(chosen), passes + 1
            counts.append(sum(canvas[at] == MASK for at in block))
        open_after.append(counts)
    return canvas, passes, open_after


def canvas_of(row):
    return [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]


@pytest.mark.slow
def test_equal_to_a_plain_loop():
    decoder = make(WINO, 8)
    state = specjax.run(decoder, params(), begin(decoder))
    taken_back = 0
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        want, passes, counts = slow(canvas_of(row), 8, WINO)
        assert (text, steps) == (want, passes)
        for block in counts:
            assert all(left <= block[0] - t for t, left in enumerate(block))  # the card's bound
        taken_back += np.asarray(state.stats.accepted[row]) @ np.arange(9) - sum(block[0] for block in counts)
    assert taken_back > 0


@pytest.mark.slow
def test_without_doubt_it_is_a_threshold_with_a_cap():
    bold = make(Wino(0.0, 0.0, 1.0, 8, 8), 8)
    assert specjax.run(bold, params(), begin(bold)).stats.steps.tolist() == [
        -(-sum(t == MASK for t in canvas_of(row)[canvas_of(row).index(MASK) :]) // 8) if row < 3 else 2
        for row in range(4)
    ]
    shy, fixed = make(Wino(2.0, 0.9), 8), make(Fixed(), 8)
    assert texts(specjax.run(shy, params(), begin(shy))) == texts(specjax.run(fixed, params(), begin(fixed)))


@pytest.mark.parametrize(
    ("build", "said"),
    (
        (lambda: Wino(share=0.0), "share in"),
        (lambda: Wino(fewest=3, most=2), "fewest <= most"),
        (lambda: make(WINO, shift=True), "Dream's shift"),
        (lambda: diffusion(LM, MASK, WINO, Prefix()), "neither a cache nor guidance"),
    ),
)
def test_bad_settings(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_rows_do_not_see_each_other():
    decoder = make(WINO, 8)
    together = texts(specjax.run(decoder, params(), begin(decoder, capacity=L)))
    alone = texts(specjax.run(decoder, params(), begin(decoder, rows=(2, 0), capacity=L + 5)))
    assert alone == [together[2], together[0]]
