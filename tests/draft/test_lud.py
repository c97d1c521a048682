"""Lexical units: what pads see, where a unit ends, the text that stands unverified, and how a target is trained."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_target as small
from support import small_training as tiny
from support.conformance import texts
from support.objectives import packed

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.assembly import registry
from specjax.draft import Lud, View
from specjax.draft.lud import pads
from specjax.draft.lud.objective import TrainLud
from specjax.draft.masks_on_disk import LUD
from specjax.draft.pard.objective import TrainPard
from specjax.lm import Wants
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.verify import GadPlus

PAD, KEY = 23, jax.random.key(5)


def test_what_a_pad_sees_and_where_it_stands():
    """Of a chain of three nodes, each with two pads: the nodes up to its own, and its own pads up to itself."""
    at, visible = pads(3)
    assert at.tolist() == [1, 2, 2, 3, 3, 4]
    sees = [np.flatnonzero(row).tolist() for row in visible]
    assert sees == [[0, 3], [0, 3, 4], [0, 1, 5], [0, 1, 5, 6], [0, 1, 2, 7], [0, 1, 2, 7, 8]]


@functools.partial(jax.jit, static_argnums=0)
def drafted(drafter, logits):
    """How many tokens of a unit each row drafts."""
    rows = len(logits)
    tokens, length, live = jnp.zeros((rows, 8), jnp.int32), jnp.full((rows,), 4), jnp.ones(rows, bool)
    sampling = SamplingArrays.make(rows, temperature=[0.0] * rows)
    sampler = Sampler(row_keys(0, "abcdefgh"[:rows]), tokens, length, live, sampling)
    tree = drafter.propose({}, logits, View(tokens, length, live, (), max_depth=3), sampler).tree
    return tree.valid.sum(axis=1) - 1, tree.tokens[:, 1:]


def test_a_unit_is_no_longer_where_alpha_is_higher():
    """It ends before the first pad that is unsure, whatever later pads are."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 16)) * 3, jnp.float32)
    chances = np.asarray(jax.nn.softmax(logits)).max(axis=2)
    before = np.full(8, 3)
    for alpha in (0.3, 0.7, 1.0):
        count, tokens = drafted(Lud(PAD, alpha=alpha), logits)
        assert count.tolist() == [([*row, False]).index(False) for row in (chances >= alpha).tolist()]
        assert (np.asarray(count) <= before).all()
        for row, size in enumerate(count.tolist()):
            assert tokens[row, :size].tolist() == np.argmax(logits[row, :size], axis=1).tolist()
        before = np.asarray(count)
    assert before.sum() == 0


@pytest.mark.parametrize("fields", [{"unit": 0}, {"alpha": 1.5}])
def test_fields(fields):
    with pytest.raises(ValueError, match="lud needs unit >= 1 and alpha in"):
        Lud(PAD, **fields)


def test_a_line_names_the_pad_or_the_targets_folder_does():
    target = tiny.model(tiny.TARGET, tiny.target_params())
    drafter, own = registry.build_drafter("lud:pad=7,unit=3,alpha=0.5", target)
    assert (drafter.pad, drafter.unit, drafter.alpha, drafter.nodes, own) == (7, 3, 0.5, 3, None)
    for line, said in (
        ("lud", r"names no mask token \(lud_pad in config.json\): `specjax train lud` makes .*lud:pad=ID"),
        ("lud:pad=x", "pad must be the id of a token of the target, got 'x'"),
        ("lud:pad=32", "pad 32 is outside the target's 32 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            registry.build_drafter(line, target)


def read(tokens):
    """Logits of one pass over whole texts."""
    return small.scores_of(small.TARGET, small.weights(), tokens, row_keys(0, "abc"), jnp.zeros(3))


def unverified(drafter):
    """What is published: a pass over the text and pads, whose run of sure outputs is taken as it is."""
    said, units = [], []
    for row, prompt in enumerate(small.PROMPTS):
        text = list(prompt)
        while len(text) < len(prompt) + small.NEW:
            block = np.zeros((3, max(map(len, small.PROMPTS)) + small.NEW + 8), np.int32)
            block[row, : len(text) + drafter.unit - 1] = [*text, *[PAD] * (drafter.unit - 1)]
            logits = np.asarray(read(jnp.asarray(block)))[row, len(text) - 1 : len(text) + drafter.unit - 1]
            sure = np.asarray(jax.nn.softmax(logits)).max(axis=1) >= drafter.alpha
            size = 1 + [*sure[1:], False].index(False)
            text += logits[:size].argmax(axis=1).tolist()
            units.append(size)
        said.append(text[len(prompt) : len(prompt) + small.NEW])
    return said, units


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "alpha"), [(3, 0.4), (1, 0.0)])
def test_a_verifier_that_keeps_everything_writes_the_published_text(unit, alpha, monkeypatch):
    """Units of one token are plain decoding's."""
    monkeypatch.setattr(small, "HEATS", (0.0,) * 3)
    drafter = Lud(PAD, unit, alpha)
    decoder = specjax.speculative(small.TARGET, drafter, GadPlus(10**6, float("inf")))
    model = {"target": small.weights(), "draft": None}
    said, units = unverified(drafter)
    got = texts(decoding.run(decoder, model, small.begin(decoder, model)))
    assert got == said
    assert (max(units) == unit > min(units)) if unit > 1 else set(units) == {1}
    plain = decoding.run(
        specjax.speculative(small.TARGET), model, small.begin(specjax.speculative(small.TARGET), model)
    )
    assert (texts(plain) == got) == (unit == 1)


OBJECTIVE = TrainLud(tiny.TARGET, tiny.TARGET, mask=31, depths=3, keep=1.0, alpha=0.01)


@pytest.mark.slow
def test_pads_are_trained_inside_units_alone():
    """Units are found from a plain pass of the target as it was. Without any, only tokens count; at alpha 0 all pads do."""
    batch, weights = packed(), tiny.target_params()
    blurred = jax.tree.map(lambda x: x * 0.9, weights)
    loss = lambda one: jax.jit(one.loss)(blurred, weights, batch, KEY)
    (value, metrics), layout = loss(OBJECTIVE), OBJECTIVE.layout(batch, KEY)
    run = lambda params, block: jax.jit(lambda p: tiny.TARGET(p, block, None, wants=Wants(logits=True)).logits)(params)
    before = np.asarray(jax.nn.softmax(run(weights, batch.block())))
    said = np.take_along_axis(before[:, :-1], batch.tokens[:, 1:, None], axis=2)[:, :, 0]  # of token t + 1
    sure = said >= 0.01
    surprise = -np.asarray(jax.nn.log_softmax(run(blurred, layout.block(batch, 31))))
    at, due = map(np.asarray, layout.targets(batch))
    total, count, inside, outside = 0.0, 0, 0, 0
    for row, r in zip(*np.nonzero(due), strict=True):
        anchor, depth = int(layout.anchor[row, r]), int(layout.depth[r])
        if depth and not sure[row, anchor : anchor + depth + 1].all():
            outside += 1
            continue
        total, count = total + surprise[row, r, batch.tokens[row, at[row, r] + 1]], count + 1
        inside += depth > 0
    assert (
        inside
        and outside
        and float(value) == pytest.approx(total / count, rel=1e-4)
        and int(metrics["weight"]) == count
    )
    every, pard = (
        loss(dataclasses.replace(OBJECTIVE, alpha=0.0)),
        loss(TrainPard(tiny.TARGET, tiny.TARGET, mask=31, depths=3, keep=1.0)),
    )
    assert float(every[0]) == pytest.approx(float(pard[0]), rel=1e-5)


@pytest.mark.slow
def test_the_command_trains_the_target(tmp_path, capsys):
    run = tiny.training(tmp_path)
    for words, said in (
        (("lud",), "target has no spare token for pads: name one that no text has, as lud:mask=7"),
        (("lud:mask=32",), "lud: mask 32 is outside the 32 tokens of 'target'"),
        (("lud:mask=31,alpha=2",), "alpha must lie in"),
        (("lud:mask=31,depths=0",), "lud: depths must be at least 1, got 0"),
        (("lud", "--draft", tmp_path / "draft"), "--draft is not for lud, which trains the target"),
    ):  # fmt: skip
        assert run(*words) == 2 and said in capsys.readouterr().err
    assert run("lud:mask=31,alpha=0.1") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())[LUD] == 31
    trained = models.load(tmp_path / "out")
    assert registry.build_drafter("lud:unit=3", trained)[0].pad == 31
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), trained.params, tiny.target_params())
    assert 0 < max(jax.tree.leaves(moved)) < 0.1
    named = ["--target", str(tmp_path / "target")]
    given = ["--data", str(tmp_path / "data.jsonl"), "--length", "12", "--output", str(tmp_path / "features")]
    assert cli.main(["capture", "medusa", *named, *given]) == 0
    given = ["--features", str(tmp_path / "features"), "--steps", "2", "--batch-size", "4"]
    assert cli.main(["train", "lud:mask=31,alpha=0.1", *named, *given, "--output", str(tmp_path / "captured")]) == 0
