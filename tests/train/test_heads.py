"""Training of feature heads: what every guess is compared with, and that each head learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_training as tiny
from support.objectives import SIZES, packed

from specjax.draft import MTP, Clover2, DFlash, DSpark, Eagle, Eagle3, Gemma4Assistant, Hydra, Medusa, PEagle
from specjax.expand import Chain
from specjax.kernels.chunks import chunked
from specjax.train.heads import teacher as of_teacher
from specjax.train.heads.clover2 import TrainClover2
from specjax.train.heads.dflash import TrainDFlash, TrainDSpark
from specjax.train.heads.eagle import TrainEagle, TrainEagle3, TrainMTP, TrainPEagle
from specjax.train.heads.gemma4_assistant import TrainGemma4Assistant
from specjax.train.heads.hydra import TrainHydra
from specjax.train.heads.medusa import TrainMedusa
from specjax.train.heads.teacher import Guess, score, teach
from specjax.train.losses import LK, ForwardKL
from specjax.train.means import MEAN
from specjax.train.objective import Batch

IDS = tuple(range(0, 32, 2))
OBJECTIVES = {
    "medusa": lambda ids: TrainMedusa(Medusa(Chain(2), heads=2).bind(tiny.TARGET), ids),
    "hydra": lambda ids: TrainHydra(Hydra(Chain(2), heads=2, prefix_layer=True).bind(tiny.TARGET), ids),
    "clover2": lambda ids: TrainClover2(Clover2(Chain(2), layers=1).bind(tiny.TARGET), ids, heads=2),
    "eagle1": lambda ids: TrainEagle(Eagle().bind(tiny.TARGET), ids),
    "peagle": lambda ids: TrainPEagle(PEagle(Chain(2)).bind(tiny.TARGET), ids, unroll=2),
    "dflash": lambda ids: TrainDFlash(
        DFlash(block=4, layers=2, inner=20, heads=2, kv_heads=1, head_dim=16).bind(tiny.TARGET), ids, anchors=12
    ),
    "dspark": lambda ids: TrainDSpark(
        DSpark(block=3, rank=4, markov="gated").bind(tiny.TARGET),
        ids,
        ForwardKL(),
        anchors=12,
        label_weight=0.1,
        law_weight=1.0,
        confidence_weight=0.1,
    ),
    "gemma4_assistant": lambda ids: TrainGemma4Assistant(Gemma4Assistant().bind(tiny.TARGET), ids, unroll=2),
    "mtp": lambda ids: TrainMTP(MTP().bind(tiny.TARGET), ids, unroll=2),
    "eagle3": lambda ids: TrainEagle3(
        Eagle3(inner=20, heads=6, kv_heads=3, head_dim=4).bind(tiny.TARGET), ids, unroll=2
    ),
}


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(14)[None] < np.asarray([[14], [11], [6]])
    mask[:, :2] = False
    return Batch(rng.integers(1, 32, (3, 14)).astype(np.int32), mask)


@pytest.mark.parametrize("ids", [(), pytest.param(IDS, marks=pytest.mark.slow)], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_head_learns(name, ids):
    """On one batch the loss falls far; nothing of the target moves, and the draft's vocabulary is not trained."""
    objective = OBJECTIVES[name](ids)
    target = tiny.target_params()
    params = objective.init(jax.random.key(0), target)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state):
        run = lambda p: objective.loss(p, target, batch(), jax.random.key(1))
        (loss, metrics), grads = jax.value_and_grad(run, has_aux=True)(params)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, loss, metrics

    losses = []
    for _ in range(60):
        params, state, loss, metrics = update(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0], losses[::20]
    assert 0 <= float(metrics["acceptance"]) <= 1 and float(metrics["weight"]) > 0
    exported = objective.export(params)
    assert ("ids" in exported) == bool(ids)
    drafter = type(objective.drafter)(**objective.fields).bind(tiny.TARGET)
    shapes = jax.eval_shape(drafter.init_params, jax.random.key(0), target)
    if ids:
        shapes = jax.eval_shape(lambda p, t: drafter.trimmed(p, t, np.asarray(ids))[1], shapes, target)
    assert jax.tree.map(jnp.shape, exported) == jax.tree.map(jnp.shape, shapes)


def test_a_guess_is_compared_with_the_law_of_its_token():
    """The target's own laws, moved to where a guess of `steps` puts them, are a perfect guess; moved wrongly they are not."""
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    teacher = teach(drafter, tiny.target_params(), batch(), (), drafter.feature_wants)
    logits = teacher.law(teacher.output.final).logits
    for steps in (1, 2):
        right = Guess(logits[:, steps : steps + 11], lambda x: x, steps, 1.0)
        wrong = Guess(logits[:, steps - 1 : steps + 10], lambda x: x, steps, 1.0)
        loss, metrics = score(teacher, [right], ForwardKL(), MEAN)
        assert float(loss) == pytest.approx(0, abs=1e-5)
        assert float(metrics["acceptance"]) == pytest.approx(1, abs=1e-5) and float(metrics["agreement_1"]) == 1
        assert float(score(teacher, [wrong], ForwardKL(), MEAN)[0]) > 0.1


def test_masked_tokens_teach_nothing():
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    objective = TrainMedusa(drafter)
    target = tiny.target_params()
    params = objective.init(jax.random.key(0), target)
    hidden = Batch(batch().tokens, jnp.zeros_like(batch().mask))
    assert float(objective.loss(params, target, hidden, jax.random.key(0))[0]) == 0
    tail = batch().tokens.copy()
    tail[2, 8:] = 5  # row 2 ends at token 6
    got = objective.loss(params, target, Batch(tail, batch().mask), jax.random.key(0))[0]
    assert float(got) == pytest.approx(float(objective.loss(params, target, batch(), jax.random.key(0))[0]), rel=1e-6)


def test_positions_whose_token_the_draft_cannot_say_are_left_out():
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    law, whole = (
        teacher.law(teacher.output.final)
        for teacher in (teach(drafter, tiny.target_params(), batch(), ids, drafter.feature_wants) for ids in (IDS, ()))
    )
    best = np.asarray(jnp.argmax(whole.logits, axis=-1))
    np.testing.assert_array_equal(law.known, np.isin(best, IDS))
    assert law.logits.shape[-1] == len(IDS) and not np.asarray(law.known).all()


@pytest.mark.parametrize("name", ["eagle3", pytest.param("clover2", marks=pytest.mark.slow)])
def test_laws_of_some_slots_at_a_time_change_nothing(name, monkeypatch):
    """Loss, gradient and metrics, with a loss that is no mean of positions and slots that fill no last chunk."""
    objective = dataclasses.replace(OBJECTIVES[name](IDS[:11]), divergence=LK("lambda"))
    target = tiny.target_params()
    params = objective.init(jax.random.key(0), target)
    told = []
    for chunk in (2048, 12):  # all 14 slots, and four of each of three rows
        monkeypatch.setattr(of_teacher, "CHUNK", chunk)
        run = lambda p: objective.loss(p, target, batch(), jax.random.key(1))
        told.append(jax.jit(jax.value_and_grad(run, has_aux=True))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *told)
    shown = lambda size: str(jax.make_jaxpr(jax.grad(lambda p: run(p)[0]))(params)).count(f"f32[3,{size},11]")
    assert shown(4) > 0 == shown(14)  # logits over the draft's vocabulary


def test_what_an_unrolled_pass_sees():
    seen = Batch(np.zeros((1, 6), np.int32), np.ones((1, 6), bool)).pairs(2).visible
    for t in range(5):
        assert np.flatnonzero(seen.first[0, t]).tolist() == list(range(max(t - 1, 0)))  # pairs up to t - 2
        assert seen.later[0, t].tolist() == [t >= 1, True]  # its slots t - 1 of pass 1 and t of pass 2
    apart = packed().pairs(2).visible  # documents of 6 and 5 tokens: pair 5 is of neither, and pair 6 begins the second
    assert np.flatnonzero(apart.first[0, 8]).tolist() == [6] and not apart.first[0, 7].any()
    assert apart.later[0, 6].tolist() == [False, True] and apart.later[0, 7].tolist() == [True, True]


class Shown(Exception):
    """Carries the features that a head would read."""


class Showing(Eagle):
    """EAGLE-1's drafter up to its first reading."""

    def read(self, params, features, *rest):
        raise Shown(features)


def test_noise_goes_as_one_over_the_length_of_a_text(monkeypatch):
    """Of every document of a row, not of the row."""
    monkeypatch.setattr(jax, "checkpoint", lambda run: run)  # what it reads must not come out of there
    target, drafter = tiny.target_params(), Showing().bind(tiny.TARGET)

    @functools.partial(jax.jit, static_argnums=0)
    def features(noise):
        try:
            TrainEagle(drafter, noise=noise).loss({}, target, packed(), jax.random.key(1))
        except Shown as shown:
            return shown.args[0]

    most = np.abs(np.asarray(features(0.1)) - np.asarray(features(0.0))).max(axis=-1)
    for row, sizes in enumerate(SIZES):
        for number, size in enumerate(sizes):
            own = most[row][np.asarray(packed().documents)[row, : most.shape[1]] == number]
            assert 0.9 * 51.2 / size < own.max() < 1.001 * 51.2 / size


def test_peagle_reads_features_with_noise():
    """As EAGLE-3 does where noise is set: in the first pass, and by the key."""
    drafter, target = PEagle(Chain(2)).bind(tiny.TARGET), tiny.target_params()
    params = TrainPEagle(drafter).init(jax.random.key(0), target)
    loss = lambda noise, key: float(
        TrainPEagle(drafter, unroll=2, noise=noise).loss(params, target, batch(), jax.random.key(key))[0]
    )
    assert loss(0.0, 1) == loss(0.0, 2) != loss(0.5, 1) != loss(0.5, 2)


def test_each_place_of_a_block_has_a_loss_of_its_own():
    """Minus the logarithm of its acceptance, where that is the loss, and not of the mean over places."""
    objective = TrainDFlash(DFlash(block=4, layers=1).bind(tiny.TARGET), IDS, LK(), anchors=12)
    target = tiny.target_params()
    params = jax.tree.map(lambda leaf: 3 * leaf, objective.init(jax.random.key(0), target))
    loss, metrics = jax.jit(lambda p: objective.loss(p, target, batch(), jax.random.key(1)))(params)
    kept = np.array([metrics[name] for name in ("acceptance", "acceptance_2", "acceptance_3")])
    weights = np.exp(-np.arange(3) / objective.gamma)
    assert float(loss) == pytest.approx(np.average(-np.log(kept), weights=weights), rel=1e-5)
    assert kept.max() > 1.05 * kept.min()


def test_what_is_made_of_few_slots_is_made_again_for_the_gradient():
    shown = lambda size: str(jax.make_jaxpr(lambda x: chunked(jnp.sin, x, size))(jnp.ones((1, 4))))
    assert "remat" in shown(2) and "remat" in shown(4)


def test_blocks_begin_where_the_next_token_is_learned():
    """Of the text, one token of row 0, all of row 1 and none of row 2 are learned."""
    mask = np.zeros((3, 14), bool)
    mask[0, 9], mask[1] = True, True
    objective = TrainDFlash(DFlash(block=4, layers=1).bind(tiny.TARGET), anchors=40)
    at = np.asarray(objective.drawn(jax.random.key(0), Batch(np.zeros((3, 14), np.int32), mask).due(1)))
    assert at.shape == (3, 40) and (at[0] == 8).all() and {*at[1]} == {*range(13)}
    assert (at >= 0).all() and (at < 13).all()


@pytest.mark.parametrize("fields", ({"unroll": 0}, {"noise": -1.0}, {"feature_weight": -1.0}, {"law_weight": -1.0}))
def test_fields_out_of_range_are_said_without_the_target(fields):
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"got .*{name}={value}") as error:
        TrainEagle3(Eagle3().bind(tiny.TARGET), **fields)
    assert "LlamaLM" not in str(error.value)
