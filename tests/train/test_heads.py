"""Training of feature heads: what every guess is compared with, and that each head learns."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_training as tiny
from support.objectives import SIZES, packed

from specjax import models
from specjax.draft import (
    MTP,
    Chimera,
    Clover,
    Clover2,
    DFlash,
    DFlash2,
    Domino,
    Dovetail,
    DSpark,
    Eagle,
    Eagle3,
    Falcon,
    Fspad,
    Gemma4Assistant,
    Griffin,
    Gumiho,
    Hydra,
    JetSpec,
    LSTMSpeculator,
    Medusa,
    MLPSpeculator,
    PEagle,
)
from specjax.draft.chimera.objective import TrainChimera
from specjax.draft.clover.objective import TrainClover
from specjax.draft.clover2.objective import TrainClover2
from specjax.draft.dflash.objective import Blocks, TrainDFlash
from specjax.draft.dflash2.objective import TrainDFlash2
from specjax.draft.dflash2.selector import Selector
from specjax.draft.domino.network import Correction
from specjax.draft.domino.objective import TrainDomino
from specjax.draft.dovetail.objective import TrainDovetail
from specjax.draft.dspark.network import MarkovHead
from specjax.draft.dspark.objective import TrainDSpark
from specjax.draft.eagle.objective import TrainEagle
from specjax.draft.eagle3.objective import TrainEagle3
from specjax.draft.falcon.objective import TrainFalcon
from specjax.draft.gemma4_assistant.objective import TrainGemma4Assistant
from specjax.draft.griffin.objective import TrainGriffin
from specjax.draft.gumiho.objective import TrainGumiho
from specjax.draft.hydra.objective import TrainHydra
from specjax.draft.jetspec.objective import TrainJetSpec
from specjax.draft.medusa import head_logits
from specjax.draft.medusa.objective import TrainMedusa
from specjax.draft.mtp.objective import TrainMTP
from specjax.draft.peagle.objective import TrainPEagle
from specjax.draft.speculator.objective import TrainLSTMSpeculator, TrainMLPSpeculator
from specjax.expand import Chain
from specjax.kernels.chunks import chunked
from specjax.objectives import teacher as of_teacher
from specjax.objectives.base import Batch, drawn_places
from specjax.objectives.losses import LK, TVD, CrossEntropy, ForwardKL
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, score, teach
from specjax.train import trainable
from specjax.train.options import TrainOptions

IDS = tuple(range(0, 32, 2))
OBJECTIVES = {
    "medusa": lambda ids: TrainMedusa(Medusa(Chain(2), heads=2).bind(tiny.TARGET), ids),
    "hydra": lambda ids: TrainHydra(Hydra(Chain(2), heads=2, prefix_layer=True).bind(tiny.TARGET), ids),
    "mlp_speculator": lambda ids: TrainMLPSpeculator(MLPSpeculator(heads=2).bind(tiny.TARGET), ids),
    "lstm_speculator": lambda ids: TrainLSTMSpeculator(LSTMSpeculator(heads=2, inner=24).bind(tiny.TARGET), ids),
    "clover": lambda ids: TrainClover(Clover(Chain(2), heads=2).bind(tiny.TARGET), ids),
    "chimera": lambda ids: TrainChimera(Chimera(Chain(2), heads=2).bind(tiny.TARGET), ids),
    "clover2": lambda ids: TrainClover2(Clover2(Chain(2), layers=1).bind(tiny.TARGET), ids, heads=2),
    "eagle1": lambda ids: TrainEagle(Eagle().bind(tiny.TARGET), ids),
    "fspad": lambda ids: TrainEagle(Fspad().bind(tiny.TARGET), ids),
    "falcon": lambda ids: TrainFalcon(Falcon().bind(tiny.TARGET), ids),
    "griffin": lambda ids: TrainGriffin(Griffin().bind(tiny.TARGET), ids, **TrainGriffin.presets["stage2"]),
    "dovetail": lambda ids: TrainDovetail(Dovetail(layers=2).bind(tiny.TARGET), ids),
    "gumiho": lambda ids: TrainGumiho(Gumiho(mlps=2).bind(tiny.TARGET), ids, noise=0.0),
    "peagle": lambda ids: TrainPEagle(PEagle(Chain(2)).bind(tiny.TARGET), ids, unroll=2),
    "dflash": lambda ids: TrainDFlash(
        DFlash(block=4, layers=2, inner=20, heads=2, kv_heads=1, head_dim=16).bind(tiny.TARGET), ids, anchors=12
    ),
    "jetspec": lambda ids: TrainJetSpec(JetSpec(block=4, layers=2).bind(tiny.TARGET), ids, anchors=12),
    "dspark": lambda ids: TrainDSpark(
        DSpark(block=3, rank=4, markov="gated").bind(tiny.TARGET),
        ids,
        ForwardKL(),
        anchors=12,
        label_weight=0.1,
        distribution_weight=1.0,
        confidence_weight=0.1,
    ),
    "domino": lambda ids: TrainDomino(Domino(block=3, state=8, rank=4).bind(tiny.TARGET), ids, anchors=12),
    "dflash2": lambda ids: TrainDFlash2(DFlash2(block=4, group=4, rank=4).bind(tiny.TARGET), ids, anchors=12),
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


@pytest.mark.slow
@pytest.mark.parametrize("ids", [(), IDS], ids=["whole", "trimmed"])
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


@pytest.mark.slow
def test_a_guess_is_compared_with_the_distribution_of_its_token():
    """The target's own distributions, moved to where a guess of `steps` puts them, are a perfect guess; moved wrongly
    they are not."""
    drafter = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    teacher = teach(drafter, tiny.target_params(), batch(), (), drafter.feature_wants)
    logits = teacher.dist(teacher.output.final).logits
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
    dist, whole = (
        teacher.dist(teacher.output.final)
        for teacher in (teach(drafter, tiny.target_params(), batch(), ids, drafter.feature_wants) for ids in (IDS, ()))
    )
    best = np.asarray(jnp.argmax(whole.logits, axis=-1))
    np.testing.assert_array_equal(dist.known, np.isin(best, IDS))
    assert dist.logits.shape[-1] == len(IDS) and not np.asarray(dist.known).all()


@pytest.mark.parametrize("name", ["eagle3", pytest.param("clover2", marks=pytest.mark.slow)])
def test_distributions_of_some_slots_at_a_time_change_nothing(name, monkeypatch):
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


def test_distributions_over_few_tokens_are_kept(monkeypatch):
    """The target's product with all of its tokens is in the forward pass alone, and nothing else changes."""
    objective = OBJECTIVES["eagle3"](IDS[:4])
    target = tiny.target_params()
    params, told, products = objective.init(jax.random.key(0), target), [], []
    for share in (8, 9):
        monkeypatch.setattr(of_teacher, "SHARE", share)
        run = lambda p: objective.loss(p, target, batch(), jax.random.key(1))
        told.append(jax.jit(jax.value_and_grad(run, has_aux=True))(params))
        shown = str(jax.make_jaxpr(jax.grad(lambda p, run=run: run(p)[0]))(params))
        products.append(len(re.findall(r":f32\[3,\d+,32\] = dot_general", shown)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *told)
    assert 0 < products[0] < products[1]


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


@pytest.mark.slow
def test_peagle_reads_features_with_noise():
    """As EAGLE-3 does where noise is set: in the first pass, and by the key."""
    drafter, target = PEagle(Chain(2)).bind(tiny.TARGET), tiny.target_params()
    params = TrainPEagle(drafter).init(jax.random.key(0), target)
    loss = lambda noise, key: float(
        TrainPEagle(drafter, unroll=2, noise=noise).loss(params, target, batch(), jax.random.key(key))[0]
    )
    assert loss(0.0, 1) == loss(0.0, 2) != loss(0.5, 1) != loss(0.5, 2)


def test_the_loss_of_blocks_is_one_mean_over_all_places():
    """Minus the logarithm of the mean acceptance, where that is the loss, in which later places of a block weigh less."""
    objective = TrainDFlash(DFlash(block=4, layers=1).bind(tiny.TARGET), IDS, LK())
    target = tiny.target_params()
    params = jax.tree.map(lambda leaf: 3 * leaf, objective.init(jax.random.key(0), target))
    run = jax.jit(lambda p, data: objective.loss(p, target, data, jax.random.key(1)))
    loss, metrics = run(params, batch())
    kept = np.array([metrics[name] for name in ("acceptance", "acceptance_2", "acceptance_3")])
    # every place whose next token counts begins a block: of n tokens in a row n, n - 1 and n - 2 places
    counted = np.array([sum(max(n - j, 0) for n in batch().mask.sum(axis=1)) for j in range(3)])
    weights = counted * np.exp(-np.arange(3) / objective.gamma)
    assert int(metrics["weight"]) == counted.sum()
    assert float(loss) == pytest.approx(-np.log(np.average(kept, weights=weights)), rel=1e-5)
    assert abs(float(loss) - np.average(-np.log(kept), weights=weights)) > 1e-4
    hole = np.zeros_like(batch().mask)
    hole[1, 2:6] = hole[1, 7:11] = (
        True  # two answers of four tokens: what comes after the first of a block's gaps does not count
    )
    assert int(run(params, Batch(batch().tokens, hole))[1]["weight"]) == 2 * (4 + 3 + 2)


# DeepSpec's `compute_dspark_loss` on what `drawn_blocks` makes: with 0.1, 0.9 and 1, and with its DFlash's weights 1, 0 and 0.
# JetSpec's is NeMo AutoModel's `KDLoss` on the same, for its authors' code is not published. Domino's is SpecForge's
# `OnlineDominoModel._domino_objective_chunk_terms` with a quarter of the loss for uncorrected blocks; DFlash 2's is its
# `_dflash_objective_chunk_terms` with a selector of three candidates. D-PACE's is `loss_function` of speculators' losses.
PUBLISHED = {
    "dspark": (2.370208501815796, 0.2326582819223404),
    "dflash": (1.8973368406295776, 0.26331010460853577),
    "dflash:dpace": (1.0966553176645721, 0.18038708935426812),
    "jetspec": (0.6859257817268372, 0.13955309987068176),
    "domino": (2.0779857740650303, 0.2842489567065452),
    "dflash2": (2.5193321445898587, 0.3819326722337458),
}
PUBLISHED_NORMS = {
    "domino": {
        "token": 0.21784371407729103,
        "memory": 0.0871193270629307,
        "inner": 0.25403191618026205,
        "head": 0.10699473247498194,
    },
    "dflash2": {"before": 0.1577811708811949, "after": 0.16699428587514845, "projection": 0.17742150967295112},
}
PUBLISHED_BIAS = [
    [-0.0340225, 0.0190930, -0.0221095, 0.0506002, -0.0135612],
    [-0.0219484, 0.0180731, -0.0244480, 0.0375997, -0.0092765],
]


def drawn_blocks():
    """Outputs that are distributions already, what blocks of four should say, and the small parts of DSpark, Domino and
    DFlash 2.
    """
    rng = np.random.default_rng(5)
    h, dists = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4, 5))
    tokens = rng.integers(0, 5, (2, 3, 5))
    table, kernel, sure, bias = (rng.normal(size=size) for size in ((5, 2), (2, 5), (7, 1), (1,)))
    due = np.arange(4)[None, None] < np.array([[4, 2, 0], [1, 3, 4]])[..., None]
    markov = {"table": {"embedding": table}, "head": {"kernel": kernel}}
    sizes = {"token": (5, 9), "memory": (3, 9), "inner": (8, 2), "head": (2, 5)}
    correction = {name: {"kernel": rng.normal(size=size)} for name, size in sizes.items()}
    own = {"markov": markov, "confidence": {"kernel": sure, "bias": bias}, "correction": correction}
    own = {"target": rng.normal(size=(5, 5)), "draft": own}
    parts = {"before": "embedding", "after": "embedding", "projection": "kernel"}
    own["draft"]["selector"] = {name: {kind: rng.normal(size=(5, 2))} for name, kind in parts.items()}
    blocks = Blocks(jnp.asarray(tokens), dists, due, np.ones(due.shape, bool), None, jnp.asarray(tokens[..., 1:]))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (h, own)), blocks


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_of_blocks_are_the_published_ones(name):
    """Loss and gradients, over blocks of four, two, one, three and four tokens and one that counts not at all."""
    drafter: Any = SimpleNamespace(drafts=4, rank=2, state=3, plain=1, confidence=True, logits=lambda own, h: h)
    drafter.bias, drafter.correction = MarkovHead("vanilla", 2, 5), Correction(5, 3, 2)
    drafter.embed = lambda own, tokens: own["target"][tokens]
    drafter.selector = Selector(5, 2, 3)
    kinds = {"dspark": TrainDSpark, "dflash": TrainDFlash, "jetspec": TrainJetSpec, "domino": TrainDomino}
    kinds["dflash2"] = TrainDFlash2
    kind, _, preset = name.partition(":")
    objective = kinds[kind](drafter, **kinds[kind].presets.get(preset or "paper", {}))
    (h, own), blocks = drawn_blocks()
    run = lambda h, own: objective.taken(objective.told(own, h, blocks), MEAN, jnp.full((2,), 0.75))
    loss, (grad, of_own) = jax.value_and_grad(run, argnums=(0, 1))(h, own)
    assert (float(loss), float(jnp.linalg.norm(grad))) == pytest.approx(PUBLISHED[name], rel=1e-5)
    if name == "dspark":
        np.testing.assert_allclose(of_own["draft"]["markov"]["head"]["kernel"], PUBLISHED_BIAS, atol=1e-6)
    for part in {"domino": ("correction",), "dflash2": ("selector",)}.get(name, ()):
        norms = {inner: float(optax.tree.norm(x)) for inner, x in of_own["draft"][part].items()}
        assert norms == pytest.approx(PUBLISHED_NORMS[name], rel=1e-5)


def test_domino_goes_from_uncorrected_blocks_to_corrected_ones():
    """At the beginning of a run the correction is not trained, at its end it alone; held-out text is read as at the end."""
    objective, target = OBJECTIVES["domino"](()), tiny.target_params()
    params = objective.init(jax.random.key(0), target)
    params["correction"]["head"]["kernel"] += 0.3 * jax.random.normal(jax.random.key(2), (4, 32))

    @jax.jit
    def found(done):
        own = batch() if done is None else dataclasses.replace(batch(), done=jnp.full((3,), done))
        run = lambda p: objective.loss(p, target, own, jax.random.key(1))[0]
        loss, grads = jax.value_and_grad(run)(params)
        return loss, optax.tree.norm(grads["correction"])

    (first, half, last, held_out), (untrained, _, trained, _) = np.transpose([found(x) for x in (0.0, 0.5, 1.0, None)])
    assert untrained == 0 < trained and abs(first - last) > 1e-3
    assert (half, held_out) == pytest.approx(((first + last) / 2, last), rel=1e-5)
    with pytest.raises(ValueError, match="domino: base_weight and base_until are shares of at most 1"):
        TrainDomino(objective.drafter, base_until=0.0)


@pytest.mark.slow
def test_blocks_that_are_read_some_at_a_time_change_nothing(monkeypatch):
    """One block of each row at a time, or all: loss, gradient and metrics are the same, and distributions of few are
    there at once."""
    objective, target = OBJECTIVES["dspark"](IDS), tiny.target_params()
    params = jax.tree.map(lambda leaf: 3 * leaf, objective.init(jax.random.key(0), target))
    told, most = [], []
    for chunk in (2048, 9):
        monkeypatch.setattr(of_teacher, "CHUNK", chunk)
        run = lambda p: objective.loss(p, target, batch(), jax.random.key(1))
        told.append(jax.jit(jax.value_and_grad(run, has_aux=True))(params))
        program = str(jax.make_jaxpr(jax.grad(run, has_aux=True))(params))
        most.append(max(int(n) for n in re.findall(rf"f32\[3,(\d+),3,{len(IDS)}\]", program)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *told)
    assert most == [12, 1]


def test_medusa_learns_the_text_as_published():
    """`preset=paper`: of every head the mean surprise at the text's own tokens, added up without weights."""
    target = tiny.target_params()
    kept = Medusa(Chain(2), heads=2).bind(tiny.TARGET)
    for ids in ((), IDS):
        objective = TrainMedusa(kept, ids, **TrainMedusa.presets["paper"])
        params = objective.init(jax.random.key(0), target)
        teacher = teach(kept, target, batch(), ids, kept.feature_wants)
        wanted = 0.0
        for j, head in enumerate(params["heads"]):
            dist = np.asarray(jax.nn.log_softmax(head_logits(head, teacher.output.final)))
            said = [
                dist[row, t, ids.index(token) if ids else token]
                for row in range(3)
                for t, token in zip(range(14), batch().tokens[row, j + 2 :].tolist(), strict=False)
                if batch().mask[row, t + j + 2] and (not ids or token in ids)
            ]
            wanted -= np.mean(said)
        loss = objective.loss(params, target, batch(), jax.random.key(0))[0]
        assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_presets_of_a_line():
    target = models.Model(tiny.TARGET, tiny.target_params(), name="toy")
    made = lambda line, **more: trainable.heads()[line.partition(":")[0]].made(
        target, TrainOptions(drafter=line, output="", **more), lambda: None
    )
    assert made("dflash").anchors == made("dspark").anchors == 512
    assert made("dflash:preset=small").anchors == made("dspark:preset=small").anchors == 64
    dpace = made("dflash:preset=dpace")
    assert (dpace.divergence, dpace.dpace, made("jetspec").dpace) == (CrossEntropy("text"), 0.5, 0.0)
    for share in (-0.5, 1.5):
        with pytest.raises(ValueError, match=r"dspark: dpace must lie in \[0, 1\]"):
            made(f"dspark:dpace={share}")
    assert (made("jetspec:preset=small").anchors, made("jetspec").gamma, made("dflash").gamma) == (64, math.inf, 4.0)
    assert made("dflash:preset=small,anchors=9").anchors == 9
    domino = made("domino:preset=paper")
    assert (domino.divergence, domino.anchors, domino.gamma) == (CrossEntropy("text"), 256, 7.0)
    hass = made("eagle1:preset=hass")
    assert (hass.unroll, hass.decay, hass.detached, hass.divergence) == (3, 1.0, True, ForwardKL(10, 10.0))
    assert made("eagle1:preset=hass", loss="forward_kl").divergence == ForwardKL() == made("eagle1").divergence
    assert made("griffin").aligned == 0 and made("griffin:preset=stage2").aligned == 3
    assert made("dflash:preset=paper").divergence == CrossEntropy("text") != made("dflash").divergence
    paper = made("medusa:preset=paper")
    assert (paper.divergence, paper.decay) == (CrossEntropy("text"), 1.0) and made("medusa").decay == 0.8
    assert made("medusa:preset=paper", loss="tvd").divergence == TVD()
    assert made("medusa", loss="cross_entropy:labels=text").divergence == CrossEntropy("text")
    with pytest.raises(ValueError, match="the training of dflash has the presets paper, dpace, small, not 'big'"):
        made("dflash:preset=big")
    with pytest.raises(ValueError, match="has no field 'preset'"):
        made("hydra:preset=paper")


def test_what_is_made_of_few_slots_is_made_again_for_the_gradient():
    shown = lambda size: str(jax.make_jaxpr(lambda x: chunked(jnp.sin, x, size))(jnp.ones((1, 4))))
    assert "remat" in shown(2) and "remat" in shown(4)


def test_blocks_begin_where_the_next_token_is_learned():
    """Of the text, one token of row 0, all of row 1 and none of row 2 are learned. Each begins one block and no two."""
    mask = np.zeros((3, 14), bool)
    mask[0, 9], mask[1] = True, True
    due = Batch(np.zeros((3, 14), np.int32), mask).due(1)
    at, real = map(np.asarray, drawn_places(jax.random.key(0), due, 512))
    assert at.shape == real.shape == (3, 13)
    assert [sorted(at[row][real[row]].tolist()) for row in range(3)] == [[8], list(range(13)), []]
    assert real[0].tolist() == [True] + [False] * 12  # those that are one come first
    few = [drawn_places(jax.random.key(seed), due, 5) for seed in range(20)]
    for at, real in few:
        chosen = np.asarray(at[1])[np.asarray(real[1])].tolist()
        assert len(set(chosen)) == len(chosen) == 5 and np.asarray(at[0])[np.asarray(real[0])].tolist() == [8]
    assert len({tuple(np.asarray(at[1]).tolist()) for at, _ in few}) > 15


@pytest.mark.parametrize(
    "fields",
    (
        {"unroll": 0},
        {"noise": -1.0},
        {"decay": -1.0},
        {"aligned": -1},
        {"feature_weight": -1.0},
        {"distribution_weight": -1.0},
    ),
)
def test_fields_out_of_range_are_said_without_the_target(fields):
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"got .*{name}={value}") as error:
        TrainEagle3(Eagle3().bind(tiny.TARGET), **fields)
    assert "LlamaLM" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "medusa",
        "hydra",
        "mlp_speculator",
        "lstm_speculator",
        "eagle1",
        "eagle3",
        "mtp",
        "peagle",
        "clover",
        "clover2",
        "chimera",
        "gemma4_assistant",
        "ppd",
        "hidden_transfer",
        "fspad",
        "griffin",
        "dovetail",
    ],
)
def test_no_weight_is_negative(name):
    """Nor no number; and a head is made of at least one."""
    target = models.Model(tiny.TARGET, tiny.target_params(), name="toy")
    made = lambda line: trainable.heads()[name].made(target, TrainOptions(drafter=line, output=""), lambda: None)
    for decay in ("-0.5", "nan"):
        with pytest.raises(ValueError, match=f"decay.*[ =]{decay}"):
            made(f"{name}:decay={decay}")
    if name in ("medusa", "hydra", "mlp_speculator", "lstm_speculator", "clover", "clover2", "chimera"):
        for heads in (0, -1):
            with pytest.raises(ValueError, match=f"{name}: heads must be at least 1.*got (heads=)?{heads}"):
                made(f"{name}:heads={heads}")
    if name in ("hydra", "eagle3", "peagle", "clover", "clover2", "gemma4_assistant", "dovetail"):
        with pytest.raises(ValueError, match=f"{name}: .*layer.*got .*layers=0"):
            made(f"{name}:layers=0")


@pytest.mark.parametrize("field", ["label_weight", "distribution_weight", "confidence_weight"])
def test_no_weight_of_dspark_is_negative(field):
    with pytest.raises(ValueError, match=f"dspark: {field} must not be negative, got -1.0"):
        TrainDSpark(DSpark(block=3, rank=4).bind(tiny.TARGET), **{field: -1.0})
