"""KLASS and P2, beside loops over whole passes and the numbers of their originals."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, MASK, PROMPTS, begin, distribution, make, params, texts

import specjax
from specjax.diffusion import Klass, PathPlanning
from specjax.diffusion.unmask import Guess
from specjax.diffusion.unmask.base import Overview

BLOCK = 8


def written(row, step_of):
    """A row's text and passes; `step_of` changes a canvas in place, given its block's open and new positions."""
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    opened = [i for i, token in enumerate(canvas) if token == MASK]
    passes = 0
    for begin_ in range(opened[0], LIMITS[row], BLOCK):
        mine, step = [i for i in opened if begin_ <= i < begin_ + BLOCK], 0
        while any(canvas[i] == MASK for i in mine):
            step_of(canvas, mine, step)
            step, passes = step + 1, passes + 1
    return canvas, passes


def klass(threshold, most, history, steps):
    """The loop's step, which remembers distributions and divergences of the whole canvas."""
    memory = {"before": 0.0, "moved": []}

    def step_of(canvas, mine, step):
        now = distribution(canvas)
        kl = (now * (np.log(now + 1e-12) - np.log(memory["before"] + 1e-12))).sum(axis=1)
        memory["before"], memory["moved"] = now, [*memory["moved"], kl][-history:]
        masked = [i for i in mine if canvas[i] == MASK]
        sure = {i: now[i].max() for i in masked}
        stable = lambda i: step >= history - 1 and all(kl[i] < most for kl in memory["moved"])
        ready = [i for i in masked if sure[i] > threshold and stable(i)]
        count = steps or len(mine)
        count = len(mine) // count + (step < len(mine) % count) if step < count else 1
        chosen = ready or sorted(masked, key=lambda i: (-sure[i], i))[: max(count, 1)]
        for i in chosen:
            canvas[i] = int(now[i].argmax())

    return step_of


def p2(steps, eta, kappa):
    def step_of(canvas, mine, step):
        now = distribution(canvas)
        known = [i for i in mine if canvas[i] != MASK]
        score = {i: np.log(now[i].max()) * (eta if i in known else 1) for i in mine}
        total = steps or len(mine)
        count = int(len(mine) * (1 - kappa((step + 1) / total))) if step + 1 < total else 0
        bar = sorted(score.values())[count]
        for i in mine:
            if score[i] < bar:
                canvas[i] = MASK
            elif i not in known:
                canvas[i] = int(now[i].argmax())

    return step_of


PAIRS = {
    "klass": (lambda: Klass(0.3, 0.5, 2, 4), lambda: klass(0.3, 0.5, 2, 4)),
    "klass-at-once": (lambda: Klass(0.25, 2.0, 1), lambda: klass(0.25, 2.0, 1, 0)),
    "p2": (lambda: PathPlanning(5), lambda: p2(5, 1.0, lambda t: t)),
    "p2-sooner": (lambda: PathPlanning(0, 1.5, "poly2"), lambda: p2(0, 1.5, lambda t: t * t)),
}


@pytest.mark.parametrize(
    "name", ["p2", *(pytest.param(name, marks=pytest.mark.slow) for name in PAIRS if name != "p2")]
)
def test_equal_to_a_loop_over_whole_passes(name):
    policy, loop = PAIRS[name]
    decoder = make(policy(), BLOCK)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        assert (text, steps) == written(row, loop())


def guess(dists, masked, step=0, **view):
    dists = jnp.asarray([dists], jnp.float32)
    masked = jnp.asarray([masked])
    tokens = jnp.argmax(dists, axis=-1).astype(jnp.int32)
    at = jnp.arange(dists.shape[1], dtype=jnp.int32)[None]
    row = lambda value: jnp.asarray([value], jnp.int32)
    logs = jnp.log(dists)
    flags = {name: jnp.ones(masked.shape, bool) for name in ("read", "known", "open", "masked", "ends")}
    view = Overview(
        at=at, tokens=tokens, log_probs=logs, log_own=logs, noise=logs[..., 0], place=at, after=row(dists.shape[1]),
        passes=row(step), blocks=row(1), **flags,
    )  # fmt: skip
    return Guess(
        tokens=tokens, log_probs=logs, masked=masked, committed=~masked, step=row(step), entry=row(dists.shape[1]),
        noise=logs[..., 0], sampled=jnp.zeros((1,), bool), overview=view, log_own=logs,
    )  # fmt: skip


def test_divergences_are_the_originals():
    """From nothing to (.7, .2, .1) 26.829 nats, from (.6, .3, .1) .0268; stable from the second pass on."""
    policy = Klass(threshold=0.5, kl=0.03)
    _, memory = policy(guess([[0.7, 0.2, 0.1]], [True]), policy.init(1, 1, 3))
    assert float(memory[1][0, 0, -1]) == pytest.approx(26.829, abs=1e-3)
    memory = policy.init(1, 1, 3)
    for step, dist in enumerate(([0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.7, 0.2, 0.1])):
        choice, memory = policy(guess([dist], [True], step), memory)
    assert memory[1][0, 0].tolist() == pytest.approx([0.0268, 0], abs=1e-4) and choice.commit.all()


def test_the_least_sure_are_open():
    """Scores -.1, -2, -.5, -3 and -1, of which three are to be open: the second, the fourth and the fifth."""
    tops = np.exp([-0.1, -2.0, -0.5, -3.0, -1.0])
    dists = [[top, *[(1 - top) / 60] * 60] for top in tops]
    choice, _ = PathPlanning(5)(guess(dists, [True, True, False, False, True], step=1), ())
    assert choice.commit[0].tolist() == [True, False, False, False, False]
    assert choice.reopen[0].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("make_one", "why"),
    [
        (lambda: Klass(history=0), "klass needs threshold >= 0, kl >= 0, history >= 1"),
        (lambda: PathPlanning(kappa="log"), "a kappa of linear, sine, poly2, poly05"),
        (lambda: PathPlanning(eta=-1.0), "p2 needs steps >= 0, eta >= 0"),
    ],
    ids=["history", "kappa", "eta"],
)
def test_wrong_values(make_one, why):
    with pytest.raises(ValueError, match=why):
        make_one()
