"""PARD: what a training pass sees and keeps, its rows against passes over plain texts, and one pass against transformers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.conformance import DRAFTERS, MIXED, TARGET, params
from support.head_start import proposed, running
from support.objectives import packed
from support.shapes import changed

from specjax import models
from specjax.assembly import registry
from specjax.draft import Acceptance, Pard, adaptive
from specjax.draft.masks_on_disk import PARD
from specjax.draft.pard.objective import Layout, TrainPard
from specjax.lm import Block, Wants
from specjax.objectives.base import Batch

KEY = jax.random.key(5)
MASK = 31
OBJECTIVE = TrainPard(tiny.TARGET, tiny.DRAFT, mask=MASK, depths=4)


def fields_of(mask):
    return {PARD: mask, "spd_type": "pard"}


def test_how_many_masks_are_kept():
    """Counted by the code of its authors, for 512 tokens."""
    objective = dataclasses.replace(OBJECTIVE, depths=8)
    assert (512, *objective.kept(512)) == (512, 358, 250, 175, 122, 102, 102, 102)
    assert dataclasses.replace(objective, keep=0.5, least=0.0).kept(8) == (4, 2, 1)


def test_what_rows_see():
    """The examples of four tokens and three depths, read off the mask that the code of its authors makes."""
    whole = Layout(jnp.repeat(jnp.arange(3), 4), jnp.tile(jnp.arange(4), 3)[None])
    batch = Batch(jnp.arange(1, 5, dtype=jnp.int32)[None], jnp.ones((1, 4), bool))
    block = whole.block(batch, MASK)
    rows = [(int(d), int(a + d)) for d, a in zip(whole.depth, whole.anchor[0], strict=True)]
    sees = lambda row: {rows[k] for k in np.flatnonzero(block.visible[0, rows.index(row)])}
    assert sees((1, 2)) == {(0, 0), (0, 1), (1, 2)}
    assert sees((2, 2)) == {(0, 0), (1, 1), (2, 2)}
    assert sees((2, 3)) == {(0, 0), (0, 1), (1, 2), (2, 3)}
    assert block.positions[0].tolist() == [at for _, at in rows]


@functools.cache
def passed():
    """The layout of packed documents, its features' logits, and what the pass read."""
    batch = packed()
    layout = OBJECTIVE.layout(batch, KEY)
    block = layout.block(batch, MASK)
    return layout, jax.jit(logits)(tiny.draft_params(), block), block


def logits(draft_params, block):
    return tiny.DRAFT(draft_params, block, None, wants=Wants(logits=True)).logits


@pytest.mark.slow
def test_a_row_is_the_last_one_of_a_plain_pass():
    """Over its document's tokens up to its anchor, and as many masks as it is deep; other documents are not seen."""
    batch, (layout, got, block) = packed(), passed()
    assert layout.anchor.shape[1] == 14 + 9 + 6 + 4
    texts, last = np.zeros((66, 20), np.int32), []
    places = [(row, r) for row in range(2) for r in range(33)]
    for text, (row, r) in zip(texts, places, strict=True):
        anchor, depth = int(layout.anchor[row, r]), int(layout.depth[r])
        before = [i for i in range(anchor + 1) if batch.documents[row, i] == batch.documents[row, anchor]]
        own = [*batch.tokens[row, before], *[MASK] * depth]
        text[: len(own)] = own
        last.append(len(own) - 1)
    at = jnp.broadcast_to(jnp.arange(20)[None], texts.shape)
    plain = jax.jit(logits)(tiny.draft_params(), Block(jnp.asarray(texts), at, jnp.zeros(66, jnp.int32)))
    wanted = np.asarray(plain)[np.arange(66), last].reshape(got.shape)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert block.positions.reshape(-1).tolist() == last


@pytest.mark.slow
def test_a_mask_is_drawn_where_it_has_something_to_predict():
    """Deeper masks keep some of those before them, and predict the tokens after their anchors."""
    batch, (layout, _, _) = packed(), passed()
    at, due = layout.targets(batch)
    for row in range(2):
        anchors = [set(layout.anchor[row, layout.depth == d].tolist()) for d in range(4)]
        assert anchors[0] > anchors[1] > anchors[2] > anchors[3]
        for r in range(33):
            following = int(layout.anchor[row, r] + layout.depth[r] + 1)
            same = following < 14 and batch.documents[row, following] == batch.documents[row, layout.anchor[row, r]]
            assert due[row, r] == bool(same and batch.mask[row, following])
            assert not due[row, r] or at[row, r] == following - 1
    others = OBJECTIVE.layout(batch, jax.random.key(6))
    assert (others.anchor != layout.anchor).any()
    few = dataclasses.replace(batch, mask=jnp.zeros((2, 14), bool).at[:, 5].set(True))
    drawn = dataclasses.replace(OBJECTIVE, least=0.0, keep=0.25).layout(few, KEY)
    assert set(drawn.anchor[1, 14:].tolist()) <= {1, 2, 3}


@pytest.mark.slow
def test_the_loss_is_that_of_its_rows():
    """By default of the text's own tokens, as published; every row counts the same, and metrics go by depth."""
    batch, (layout, got, _) = packed(), passed()
    at, due = (np.asarray(x) for x in layout.targets(batch))
    value, metrics = jax.jit(OBJECTIVE.loss)(tiny.draft_params(), tiny.target_params(), batch, KEY)
    said = np.take_along_axis(batch.tokens, np.minimum(at + 1, 13), axis=1)
    surprise = -np.take_along_axis(np.asarray(jax.nn.log_softmax(got)), said[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(value, surprise[due].mean(), rtol=1e-5)
    assert metrics["weight"] == due.sum()
    target = tiny.TARGET(tiny.target_params(), batch.block(), None, wants=Wants(logits=True)).logits
    p = np.take_along_axis(np.asarray(jax.nn.softmax(target)), at[:, :, None], axis=1)
    kept = np.minimum(p, jax.nn.softmax(got)).sum(axis=2)
    for depth, name in enumerate(("acceptance", "acceptance_2", "acceptance_3", "acceptance_4")):
        of_depth = due & (layout.depth == depth)[None]
        np.testing.assert_allclose(metrics[name], kept[of_depth].mean(), rtol=1e-4)


ROWS = dataclasses.replace(MIXED.pick(1, 4, 0, 7), options=({"temperature": 0.0},) * 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft model that names a mask, and one with a row of its own for the mask."""
    home = tmp_path_factory.mktemp("pard")
    models.save(home / "target", TARGET, params()["target"])
    models.save(home / "draft", DRAFTERS["pard"].lm, params("pard")["draft"], fields=fields_of(95))
    wide = models.LlamaLM(changed(DRAFTERS["pard"].lm.config, vocab_size=97))
    models.save(home / "wide", wide, jax.jit(wide.init)(jax.random.key(3)), fields=fields_of(96))
    return home


@pytest.fixture(scope="module")
def midway(folders):
    """A decoder whose drafter is read from a folder, its parameters, and rows that accepted different numbers of tokens."""
    drafter, own = registry.build_drafter(f"pard:model={folders / 'draft'},length=3", models.load(folders / "target"))
    model = {"target": params()["target"], "draft": own}
    decoder, state = running(drafter, model, steps=4, rows=ROWS)
    assert len({*(state.length - state.draft.length).tolist()}) > 1
    return decoder, model, state


def of_transformers(folder, state, length):
    """The folder's model, read by transformers, over every row's text and masks: the likeliest tokens of its last rows."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert made.config.spd_type == "pard"
    for row, size in enumerate(state.length.tolist()):
        ids = [*state.tokens[row, :size].tolist(), *[made.config.pard_token] * (length - 1)]
        with torch.no_grad():
            yield [ids[size - 1], *made(torch.tensor([ids])).logits[0, -length:, :96].argmax(dim=-1).tolist()]


@pytest.mark.slow
def test_drafts_are_those_of_transformers(midway, folders):
    decoder, model, state = midway
    assert proposed(decoder, model, state).tree.tokens.tolist() == [*of_transformers(folders / "draft", state, 3)]


@pytest.mark.slow
def test_a_mask_may_have_a_row_after_the_targets(folders):
    drafter, own = registry.build_drafter(f"pard:model={folders / 'wide'},length=5", models.load(folders / "target"))
    model = {"target": params()["target"], "draft": own}
    decoder, state = running(drafter, model, steps=0, rows=ROWS)
    assert (drafter.mask_id, drafter.lm.vocab_size) == (96, 96)
    assert proposed(decoder, model, state).tree.tokens.tolist() == [*of_transformers(folders / "wide", state, 5)]


@pytest.mark.slow
def test_what_lies_after_the_text_is_not_read(midway):
    decoder, model, state = midway
    after = jnp.arange(state.tokens.shape[1])[None] >= state.length[:, None]
    spoilt = dataclasses.replace(state, tokens=jnp.where(after, 17, state.tokens))
    want = proposed(decoder, model, state).tree.tokens
    assert (proposed(decoder, model, spoilt).tree.tokens == want).all()


@pytest.mark.slow
def test_the_command_makes_a_folder_that_drafts(tmp_path, capsys):
    """Of a plain draft model without spare tokens: its mask has a row of its own."""
    run = tiny.training(tmp_path)
    assert run("pard") == 2 and "pard needs --draft" in capsys.readouterr().err
    assert run("pard", "--draft", tmp_path / "draft", "--start", "x") == 2
    assert "--start is not for pard" in capsys.readouterr().err
    for mask in (33, -7):
        assert run(f"pard:mask={mask}", "--draft", tmp_path / "draft") == 2
        assert f"mask {mask} is outside the 32 tokens of" in capsys.readouterr().err
    assert run("pard:depths=3", "--draft", tmp_path / "draft") == 0
    drafter, own = registry.build_drafter(f"pard:model={tmp_path / 'out'},length=4", models.load(tmp_path / "target"))
    assert (drafter.mask_id, drafter.lm.vocab_size, drafter.depth) == (32, 32, 4)
    table, before = own["embed"]["embedding"], tiny.draft_params()["embed"]["embedding"]
    assert table.shape == (33, 16) and (table[:32] != before).any()


@pytest.mark.slow
def test_what_a_folder_must_say(folders, tmp_path):
    target = models.load(folders / "target")
    asked = lambda folder: registry.build_drafter(f"pard:model={folder}", target)
    drafter, _ = asked(folders / "draft")
    assert (drafter.mask_id, drafter.depth, drafter.is_chain) == (95, 12, True)
    with pytest.raises(
        ValueError, match=r"names no mask token \(pard_token in config.json\): `specjax train pard` makes"
    ):
        asked(folders / "target")
    file = tmp_path / "draft" / "config.json"
    models.save(file.parent, DRAFTERS["pard"].lm, params("pard")["draft"])
    plain = json.loads(file.read_text())
    for fields, said in (
        (fields_of(96), "pard_token is 96, and the table of embeddings has 96 rows"),
        (fields_of(-1), "pard_token is -1"),
    ):
        file.write_text(json.dumps(plain | fields))
        with pytest.raises(ValueError, match=said):
            asked(file.parent)


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: Pard(DRAFTERS["pard"].lm, mask_id=96).bind(TARGET), "mask_id 96 is outside .* table of 96 tokens"),
        (lambda: adaptive(DRAFTERS["pard"], Acceptance(0.2), 3).bind(TARGET), "features"),
        (lambda: dataclasses.replace(OBJECTIVE, depths=0), "depths must be at least 1"),
        (lambda: dataclasses.replace(OBJECTIVE, keep=1.5), "keep and least must lie in"),
    ),
)
def test_bad_settings(make, said):
    with pytest.raises(ValueError, match=said):
        make()
