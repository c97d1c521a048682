"""A batch that comes in parts is trained on as in one piece; and what the draft cannot say counts against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.objectives import DRAWN, FIXED, alone, frozen, packed

from specjax.diffusion import Learn2PD
from specjax.diffusion.unmask.learn2pd.objective import TrainFilter
from specjax.draft import Medusa
from specjax.draft.lud.objective import TrainLud
from specjax.draft.pard.objective import TrainPard
from specjax.draft.pard2.features import Joined
from specjax.draft.pard2.objective import TrainPard2
from specjax.draft.self_diffusion.objective import TrainSelfDiffusion
from specjax.expand import Chain
from specjax.objectives.losses import LK, TVD, TVDPP, CrossEntropy, ForwardKL, acceptance
from specjax.objectives.masked import CertaintyForcing, ConfidenceAware, Conversion, MaskedDiffusion
from specjax.objectives.means import MEAN, Counted, Parts, counts
from specjax.objectives.pat import Pat
from specjax.objectives.teacher import Guess, HeadObjective, score, teach
from specjax.search.merged_prompts.objective import TrainMergedPrompts
from specjax.train.distill import Distill
from specjax.train.loop import gradients

IDS = tuple(range(1, 32, 2))
"""Half of the vocabulary."""
OF_BATCHES = {"lk": LK(), "lk_lambda": LK("lambda"), "tvdpp": TVDPP()}
"""Losses that are no mean of positions."""
LEARN2PD = TrainFilter(tiny.DRAFT, 31, False, Learn2PD(block_length=4), passes=2)
OTHERS = {
    **{f"distill_{name}": Distill(tiny.TARGET, tiny.DRAFT, loss) for name, loss in OF_BATCHES.items()},
    "joint_self": dataclasses.replace(FIXED["joint"], teacher="self"),
    "distill_labels": Distill(tiny.TARGET, tiny.DRAFT, CrossEntropy()),
    "distill_chosen": Distill(tiny.TARGET, tiny.DRAFT, keep=0.4),
    "distill_on_policy": Distill(tiny.TARGET, tiny.DRAFT, on_policy=0.5, prompt=3),
    "pard": TrainPard(tiny.TARGET, tiny.DRAFT, mask=31, depths=3),
    "pard2": TrainPard2(tiny.TARGET, tiny.DRAFT, mask=31, depths=3, joined=Joined((-1, 1)), without=0.5),
    "lud": TrainLud(tiny.TARGET, tiny.TARGET, mask=31, depths=3, alpha=0.01),
    "pat": Pat(tiny.TARGET, width=16, rank=5, lora_rank=2, updates=8),
    "self_diffusion": TrainSelfDiffusion(tiny.DRAFT, 31, block=4),
    "merged_prompts": TrainMergedPrompts(tiny.TARGET, parts=3, rank=4),
    "masked": MaskedDiffusion(tiny.DRAFT, 31, False),
    "a2d": Conversion(tiny.DRAFT, 31, False, block=3),
    "cap": ConfidenceAware(tiny.DRAFT, 31, False, block=4),
    "dparallel": CertaintyForcing(tiny.DRAFT, 31, False, block_length=4),
    "learn2pd": LEARN2PD,
    **{
        f"{name}_trimmed": dataclasses.replace(objective, ids=IDS)
        for name, objective in (FIXED | DRAWN).items()
        if isinstance(objective, HeadObjective)
    },
    "medusa_text_trimmed": dataclasses.replace(FIXED["medusa"], ids=IDS, divergence=CrossEntropy("text")),
    **{
        f"medusa_trimmed_{name}": dataclasses.replace(FIXED["medusa"], ids=IDS, divergence=loss)
        for name, loss in OF_BATCHES.items()
    },
}
WHOLE = "kangaroo", "distill", "lm", "lm_sparsity", "s2d", "ppd", "hidden_transfer", "acceptance", "joint"
"""Objectives over the whole vocabulary. Those of the other heads take their means as over fewer tokens."""
QUICK = "medusa_trimmed", "distill_chosen", "distill_on_policy"


def of_name(name):
    objective = (FIXED | DRAWN | OTHERS)[name]
    return dataclasses.replace(objective, noise=0.1) if name.startswith("eagle1") else objective


def started(name):
    """An objective, parameters, and what is frozen."""
    objective = of_name(name)
    target = frozen("acceptance" if name in ("acceptance", "distill_chosen") else "distill")
    if name in ("masked", "a2d", "cap", "dparallel", "learn2pd", "self_diffusion"):
        target = tiny.draft_params()
    if name == "merged_prompts":
        target = {"lm": target, "begins": jnp.zeros(32, bool), "ends": jnp.zeros(32, bool)}
    return objective, objective.init(jax.random.key(3), target), target


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*WHOLE, *OTHERS)]
)
def test_parts_are_the_whole(name):
    """The four rows have 4, 5, 6 and 4 tokens to predict: a mean of means would be another number."""
    objective, params, target = started(name)
    batch = dataclasses.replace(alone(), done=np.full(4, 0.25, np.float32))  # as training gives them

    @jax.jit
    def both(params):
        run = lambda parts: gradients(objective, params, target, batch, jax.random.key(0), parts)
        return run(1), run(4)

    (grads, metrics, count), (other, others, counts) = both(params)
    assert count == counts and metrics.keys() == others.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(others[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    most = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    assert most > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * most), grads, other)


def test_a_mean_knows_the_whole_batch():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.5
    kept = []
    for rows in (slice(0, 1), slice(1, 4)):
        mean = Counted()
        mean(values[rows], weights[rows])
        mean.whole(values[rows], weights[rows])
        kept.append(mean.kept)
    found = jax.tree.map(jnp.add, *kept)
    shares, wholes = [], []
    for rows in (slice(0, 1), slice(1, 4)):
        mean = Parts(found)
        shares.append(float(mean(values[rows], weights[rows])))
        wholes.append(float(mean.whole(values[rows], weights[rows])))
    want = values[weights].mean()
    assert sum(shares) == pytest.approx(want, rel=1e-5) and wholes == pytest.approx([want, want], rel=1e-5)
    mean.done()
    with pytest.raises(StopIteration):
        mean(values, weights)
    with pytest.raises(ValueError, match="took fewer means of a part than were counted"):
        Parts(found).done()


def test_a_choice_is_among_the_values_of_all_parts():
    values = np.arange(6.0).reshape(2, 3)

    def shares(mean, part):
        return mean(part, part >= jnp.sort(mean.every(part))[-2])  # of the two largest, which are both in one part

    def count(choices):
        kept = []
        for number in range(2):
            mean = Counted(number, 2, choices)
            shares(mean, values[number])
            kept.append(mean.kept)
        return jax.tree.map(jnp.add, *kept)

    assert [float(shares(Parts(counts(count)), part)) for part in values] == [0.0, 4.5]


@functools.cache
def trimmed():
    """The target, its distribution over the draft's tokens and over all, a random draft over those, and that draft over
    all."""
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    teacher, other = (teach(drafter, tiny.target_params(), packed(), ids, drafter.feature_wants) for ids in (IDS, ()))
    dist, every = (one.dist(one.output.final) for one in (teacher, other))
    draft = jax.random.normal(jax.random.key(0), dist.logits.shape)
    scattered = jnp.full(every.logits.shape, -jnp.inf).at[..., np.asarray(IDS)].set(draft)
    return teacher, dist, every.logits, draft, scattered


@pytest.mark.slow
def test_acceptance_is_against_the_targets_distribution_over_all_tokens():
    """By enumeration, and so is total variation."""
    _, dist, every, draft, scattered = trimmed()
    p, q = (np.asarray(jax.nn.softmax(logits), np.float64) for logits in (every, scattered))
    kept, distance = np.minimum(p, q).sum(-1), 0.5 * np.abs(p - q).sum(-1)
    np.testing.assert_allclose(acceptance(dist.logits, draft, dist.outside), kept, atol=1e-6)
    np.testing.assert_allclose(TVD().positions(dist.logits, draft, dist.outside), distance, atol=1e-6)
    assert (np.asarray(acceptance(dist.logits, draft)) > kept + 0.01).mean() > 0.5
    due = np.asarray(packed().due(1))
    seen = dict(mean=MEAN, known=dist.known[:, :-1], outside=dist.outside[:, :-1])
    taken = lambda loss: float(loss(dist.logits[:, :-1], draft[:, :-1], due, **seen))
    accepted = kept[:, :-1][due].mean()
    assert taken(TVD()) == pytest.approx(1 - accepted, rel=1e-5)
    assert taken(LK()) == pytest.approx(-np.log(accepted), rel=1e-5)
    known = due & np.asarray(dist.known)[:, :-1]
    own = p[..., IDS] / p[..., IDS].sum(-1, keepdims=True)
    kl = (own * np.log(own / q[..., IDS])).sum(-1)[:, :-1][known].mean()
    share = np.exp(-3 * accepted)
    assert taken(LK("lambda")) == pytest.approx(share * kl + (1 - share) * (1 - accepted), rel=1e-5)
    share = (q * (q < p))[:, :-1][due].sum(-1).mean()  # the mean reward of a token drawn from q
    assert taken(TVDPP()) == pytest.approx((1 - accepted) / np.sqrt(share * (1 - share)), rel=1e-4)


@pytest.mark.slow
def test_a_heads_acceptance_is_over_every_position():
    """Of guesses at two depths: those that the target would not take of any draft of these tokens count as well."""
    teacher, dist, every, draft, scattered = trimmed()
    guesses = [Guess(draft[:, : 13 - steps], lambda x: x, steps, 1.0) for steps in (1, 2)]
    metrics = score(teacher, guesses, ForwardKL(), MEAN)[1]
    for steps, name in ((1, "acceptance"), (2, "acceptance_2")):
        due = np.asarray(packed().due(steps + 1))
        p = np.asarray(jax.nn.softmax(every), np.float64)[:, steps : steps + due.shape[1]]
        q = np.asarray(jax.nn.softmax(scattered), np.float64)[:, : due.shape[1]]
        assert float(metrics[name]) == pytest.approx(np.minimum(p, q).sum(-1)[due].mean(), rel=1e-5)
        right = (p.argmax(-1) == q.argmax(-1))[due]
        assert float(metrics[f"agreement_{steps}"]) == pytest.approx(right.mean(), abs=1e-6)
