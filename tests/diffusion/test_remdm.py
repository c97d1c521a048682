"""ReMDM beside loops over its draws, its marginals, and what the published program wrote from given uniform numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import diffusion_traces as traces
from support.diffusion_traces import needs_traces
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, distribution, make, params, texts, uniform_of

import specjax
from specjax import models
from specjax.diffusion import Prefix, ReMDM, diffusion
from specjax.diffusion.unmask.remdm import SCHEDULES, times
from specjax.lm import Block, Wants

BLOCK = 8


def loop(row, policy):
    """A row's text and passes."""
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    opened, noise, passes = [i for i, token in enumerate(canvas) if token == MASK], uniform_of(row), 0
    for first in range(opened[0], LIMITS[row], BLOCK):
        mine = [i for i in opened if first <= i < first + BLOCK]
        total, sure = policy.steps or len(mine), {}
        write, again = policy.chances(*times(total))
        for step in range(total + 1):
            dist, passes = distribution(canvas), passes + 1
            known = [i for i in mine if canvas[i] != MASK]
            weights = {i: np.exp(-sure[i]) for i in known}
            for i in mine:
                u = noise(i, step)
                if i in known:
                    share = weights[i] / sum(weights.values()) if policy.schedule == "conf" else 1
                    if step < total and u < share * again[step]:
                        canvas[i] = MASK
                elif step == total or u < write[step]:
                    canvas[i] = int(dist[i].argmax())
                    sure[i] = dist[i].max()
    return canvas, passes


POLICIES = {
    "cap": ReMDM("cap", 12, 0.3),
    "rescale": ReMDM("rescale", 10, 0.5),
    "conf": ReMDM("conf", 10),
    "loop": ReMDM("loop", 14, 0.2, 0.6, 0.3, 0.7),
    "forward_backward": ReMDM("forward_backward", 9),
    "mdlm": ReMDM("mdlm"),
}


@pytest.mark.parametrize(
    "name", ["cap", *(pytest.param(name, marks=pytest.mark.slow) for name in POLICIES if name != "cap")]
)
def test_equal_to_a_loop_over_its_draws(name):
    decoder = make(POLICIES[name], BLOCK)
    rows = (3,) if name == "cap" else range(4)  # the one in the fast set has open spans
    state = specjax.run(decoder, params(), begin(decoder, rows, slots=4))
    found = list(zip(texts(state), state.stats.steps.tolist(), strict=True))[: len(rows)]
    assert found == [loop(row, POLICIES[name]) for row in rows]


@pytest.mark.parametrize(
    ("policy", "t", "s", "write", "again"),
    [
        (ReMDM("cap", eta=0.02), 0.5, 0.4, 0.22, 0.02),
        (ReMDM("rescale", eta=0.1), 0.5, 0.4, 0.28, 0.08),
        (ReMDM("forward_backward"), 0.5, 0.4, 0.4, 0.2),
        (ReMDM("rescale", eta=0.1), 0.2, 0.1, 0.55, 0.0125),
        (ReMDM("forward_backward"), 0.2, 0.1, 1.0, 0.125),
    ],
    ids=["cap", "rescale", "both", "rescale-late", "both-late"],
)
def test_chances_of_one_step(policy, t, s, write, again):
    found = policy.chances(np.asarray([t]), np.asarray([s]))
    np.testing.assert_allclose(np.ravel(found), [write, again], atol=1e-12)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("conf", "loop")])
def test_a_share_one_minus_t_is_known_at_every_time(schedule):
    begin, end = times(50)
    known, chances = 0.0, ReMDM(schedule, eta=0.3).chances(begin, end)
    for write, again, s in list(zip(*chances, end, strict=True))[:-1]:  # in the last step forward_backward writes all
        known = known * (1 - again) + (1 - known) * write
        assert known == pytest.approx(1 - s, abs=1e-9) and 0 <= min(write, again) and max(write, again) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("make_one", "why"),
    [
        (lambda: ReMDM("sometimes"), "remdm needs a schedule of mdlm, cap"),
        (lambda: ReMDM(eta=1.5), "eta in"),
        (lambda: ReMDM(t_on=0.1, t_off=0.2), "0 < t_off < t_on < 1"),
        (lambda: ReMDM("loop", eta=0.5), "eta <= "),
        (lambda: diffusion(LM, MASK, ReMDM(), Prefix()), "ReMDM needs predictions for known tokens too"),
    ],
    ids=["schedule", "eta", "times", "rest", "cache"],
)
def test_wrong_values(make_one, why):
    with pytest.raises(ValueError, match=why):
        make_one()


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["remdm_mdlm-1", "remdm_cap-2", "remdm_rescale-3", "remdm_conf-4", "remdm_loop-5", "remdm_forward_backward-6"],
)
def test_equal_to_what_the_published_program_wrote(setting):
    """Its draws of a token or the mask, from the numbers that the line names, with this policy's chances."""
    lines = traces.lines_of(setting)
    model = models.load(traces.FOLDER / lines[0]["model"], dtype="float32")
    mask, how = model.masked.mask_id, lines[0]["settings"]
    schedule = how["sampler"].removeprefix("remdm-").replace("-", "_")
    fields = {name: how[name] for name in ("eta", "t_on", "t_off", "alpha_on") if name in how}
    policy, total = ReMDM(schedule, how["steps"], **fields), how["steps"]
    seed = int(lines[0]["changes"].partition("default_rng(")[2].partition(")")[0])
    uniforms = np.random.default_rng(seed).random((26, 64, 64))
    size = 64

    @jax.jit
    def logits_of(tokens, end):
        at = jnp.arange(size)
        block = Block(tokens[None], at[None], jnp.zeros(1, int), (at < end)[None, None], causal=False)
        return model.lm(model.params, block, None, wants=Wants(logits=True)).logits[0]

    for line in lines:
        prompt, count = line["prompt"], line["gen_length"]
        new, sure = np.full(count, mask), np.zeros(count)
        write, again = policy.chances(*times(total))
        for step in range(total + 1):
            padded = jnp.asarray([*prompt, *new, *[0] * (size - len(prompt) - count)])
            logits = np.asarray(logits_of(padded, len(prompt) + count), np.float64)[len(prompt) :][:count]
            logits[:, mask] = -np.inf
            dist = np.exp(logits - logits.max(axis=1, keepdims=True))
            dist /= dist.sum(axis=1, keepdims=True)
            known = new != mask
            if step == total:
                new = np.where(known, new, dist.argmax(axis=1))
                break
            sigma = np.full(count, again[step])
            if schedule == "conf":
                weights = np.where(known, np.exp(-sure), 0.0)
                sigma = again[step] * weights / max(weights.sum(), 1e-30)
            q = np.where(known[:, None], np.eye(64)[new] * (1 - sigma)[:, None], dist * write[step])
            q[:, mask] = np.where(known, sigma, 1 - write[step])
            drawn = (q / (1e-10 - np.log(uniforms[step, :count] + 1e-10))).argmax(axis=1)
            sure = np.where(~known & (drawn != mask), dist[np.arange(count), drawn], sure)
            new = drawn
        assert new.tolist() == line["tokens"]
