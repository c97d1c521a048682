"""A batch that comes in parts is trained on as in one piece; and what the draft cannot say counts against it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.objectives import DRAWN, FIXED, alone, frozen, packed

from specjax.draft import DSpark, Eagle3, Medusa
from specjax.expand import Chain
from specjax.train.distill import Distill
from specjax.train.heads.dflash import TrainDSpark
from specjax.train.heads.eagle import TrainEagle3
from specjax.train.heads.medusa import TrainMedusa
from specjax.train.heads.teacher import teach
from specjax.train.loop import Settings, TrainState, update
from specjax.train.losses import LK, TVD, TVDPP, CrossEntropy, acceptance
from specjax.train.masked import CertaintyForcing, MaskedDiffusion
from specjax.train.means import Counted, Parts

IDS = tuple(range(1, 32, 2))
"""Half of the vocabulary."""
TRIMMED = {
    "eagle3": TrainEagle3(Eagle3().bind(tiny.TARGET), IDS, unroll=3),
    "dspark": TrainDSpark(DSpark(block=3, rank=4).bind(tiny.TARGET), IDS, anchors=6),
}
OTHERS = {
    "distill_lk": Distill(tiny.TARGET, tiny.DRAFT, LK()),
    "distill_lk_lambda": Distill(tiny.TARGET, tiny.DRAFT, LK("lambda")),
    "distill_tvdpp": Distill(tiny.TARGET, tiny.DRAFT, TVDPP()),
    "distill_labels": Distill(tiny.TARGET, tiny.DRAFT, CrossEntropy()),
    "masked": MaskedDiffusion(tiny.DRAFT, 31, False),
    "dparallel": CertaintyForcing(tiny.DRAFT, 31, False, block_length=4),
    **{f"{name}_trimmed": objective for name, objective in TRIMMED.items()},
}
QUICK = "distill_lk", "eagle3_trimmed"
HEADS = "medusa", "eagle1", "kangaroo", "distill", "ppd", "acceptance"
"""One of each way that a loss is put together."""


def of_name(name):
    return (FIXED | DRAWN | OTHERS)[name]


def target_of(name):
    return frozen("distill" if name.startswith(("distill", "masked", "dparallel")) else name.removesuffix("_trimmed"))


def updated(objective, params, target, accumulate):
    settings = Settings(steps=10, clip=1e9, accumulate=accumulate)
    state = TrainState(jnp.int32(0), jax.tree.map(jnp.copy, params), settings.optimizer.init(params))
    return update(objective, settings, state, target, alone())[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*HEADS, *OTHERS)]
)
def test_two_parts_are_the_whole(name):
    """The rows have 4, 5, 6 and 4 tokens to predict: a mean of means would be another number."""
    objective = of_name(name)
    if name == "eagle1":
        objective = dataclasses.replace(objective, noise=0.1)
    target = target_of(name)
    params = (
        tiny.DRAFT.init(jax.random.key(2))
        if name in ("masked", "dparallel")
        else objective.init(jax.random.key(2), target)
    )
    whole, parts = (updated(objective, params, target, accumulate) for accumulate in (1, 2))
    assert whole.keys() == parts.keys() and float(whole["grad_norm"]) > 0
    for key, value in whole.items():
        np.testing.assert_allclose(value, parts[key], rtol=2e-5, atol=1e-6, err_msg=key)


def test_a_mean_knows_the_whole_batch():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.5
    kept = []
    for rows in (slice(0, 1), slice(1, 4)):
        mean = Counted()
        mean(values[rows], weights[rows])
        mean.whole(values[rows], weights[rows])
        kept.append(mean.kept)
    counts = jax.tree.map(jnp.add, *kept)
    shares, wholes = [], []
    for rows in (slice(0, 1), slice(1, 4)):
        mean = Parts(counts)
        shares.append(float(mean(values[rows], weights[rows])))
        wholes.append(float(mean.whole(values[rows], weights[rows])))
    want = values[weights].mean()
    assert sum(shares) == pytest.approx(want, rel=1e-5) and wholes == pytest.approx([want, want], rel=1e-5)
    with pytest.raises(StopIteration):
        mean(values, weights)


def test_what_the_draft_cannot_say_counts_against_it():
    """By enumeration: acceptance and total variation against the target's law over all 32 tokens."""
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    teacher = teach(drafter, tiny.target_params(), packed(), IDS, drafter.feature_wants)
    every = teach(drafter, tiny.target_params(), packed(), (), drafter.feature_wants)
    p = np.asarray(jax.nn.softmax(every.output.logits), np.float64)
    draft = jax.random.normal(jax.random.key(0), teacher.output.logits.shape)
    q = np.zeros_like(p)
    q[..., IDS] = jax.nn.softmax(draft)
    np.testing.assert_allclose(
        acceptance(teacher.output.logits, draft, teacher.outside), np.minimum(p, q).sum(-1), atol=1e-6
    )
    np.testing.assert_allclose(
        TVD().positions(teacher.output.logits, draft, teacher.outside), 0.5 * np.abs(p - q).sum(-1), atol=1e-6
    )
    assert (np.asarray(acceptance(teacher.output.logits, draft)) > np.minimum(p, q).sum(-1) + 0.01).mean() > 0.5


def test_positions_of_tokens_that_the_draft_lacks_are_misses():
    """Of a draft that copies the target's law: what it accepts is the mass of its own tokens, over every position."""
    drafter = Medusa(Chain(1), heads=1).bind(tiny.TARGET)
    objective = TrainMedusa(drafter, IDS)
    target = tiny.target_params()
    params = objective.init(jax.random.key(0), target)
    metrics = objective.loss(params, target, packed(), jax.random.key(0))[1]
    logits = np.asarray(teach(drafter, target, packed(), (), drafter.feature_wants).output.logits)
    own = np.isin(logits.argmax(-1), IDS)
    due = np.asarray(packed().due(2))
    assert not own[:, 1:-1][due[:, : own.shape[1] - 2]].all()
    assert float(metrics["agreement_1"]) <= own[:, 1:-1][due[:, : own.shape[1] - 2]].mean() + 1e-6
