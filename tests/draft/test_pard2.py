"""PARD-2: which features are read, drafts against transformers, training rows against drafts, the loss, and folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.conformance import DRAFTERS, MIXED, TARGET, params
from support.head_start import proposed, running
from support.objectives import packed
from support.random_weights import whole_numbers

from specjax import models
from specjax.assembly import registry
from specjax.draft import trim
from specjax.draft.pard.objective import TrainPard
from specjax.draft.pard2.features import Joined, default_layers
from specjax.draft.pard2.folder import joined_fields, write_projection
from specjax.draft.pard2.objective import TrainPard2, reached
from specjax.lm import Output, Wants
from specjax.objectives.base import Batch
from specjax.train.options import TrainOptions
from specjax.train.pard import pard2_task

KEY = jax.random.key(5)
JOINED = Joined((-1, -3, 1), 0.2, True)
OBJECTIVE = TrainPard2(tiny.TARGET, tiny.DRAFT, mask=31, depths=4, joined=Joined((-1, 1), 0.5, True), without=0.0)
FC = {"kernel": whole_numbers((192, 64), 3), "bias": whole_numbers((64,), 4) / 8}
ROWS = dataclasses.replace(MIXED.pick(1, 4, 0, 7), options=({"temperature": 0.0},) * 4)


def test_which_features_are_joined():
    """Counted as `hidden_states` of transformers: n is the output of the n-th layer, and the last follows the norm."""
    joined = Joined((-1, -8, -16, -24, 3)).of(36)
    assert joined.places(36) == (None, 28, 20, 12, 2)
    assert joined.wants(36) == Wants(hidden=(2, 12, 20, 28), final=True)
    assert Joined((36, 1)).of(36).places(36) == (None, 0)
    output = Output(None, hidden={0: jnp.ones((1, 2, 3)), 2: jnp.zeros((1, 2, 3))}, final=jnp.full((1, 2, 3), 2.0))
    read = Joined((-1, 3, 1)).features(output, 4)
    assert read[0, 1].tolist() == [2.0] * 3 + [0.0] * 3 + [1.0] * 3


def test_layers_by_default():
    assert default_layers(36) == default_layers(24) == (-1, -8, -16, -24)
    assert default_layers(8) == (-1, -2, -4, -6)
    assert (default_layers(3), default_layers(2)) == ((-1, -2, -3), (-1,))
    assert Joined().of(8).target_layers == (-1, -2, -4, -6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a model of PARD-2 with its projection."""
    home = tmp_path_factory.mktemp("pard2")
    models.save(home / "target", TARGET, params()["target"])
    models.save(
        home / "draft", DRAFTERS["pard2"].lm, params("pard2")["draft"]["lm"], fields=joined_fields(95, JOINED, 192)
    )
    write_projection(home / "draft", FC, "float32")
    return home


@pytest.fixture(scope="module")
def midway(folders):
    """A decoder whose drafter is read from a folder, its parameters, and rows that accepted different numbers of tokens."""
    drafter, own = registry.build_drafter(f"pard2:model={folders / 'draft'},length=3", models.load(folders / "target"))
    assert (drafter.joined, drafter.mask_id, drafter.layers) == (JOINED, 95, 3)
    model = {"target": params()["target"], "draft": own}
    decoder, state = running(drafter, model, steps=4, rows=ROWS)
    assert len({*(state.length - state.draft.length).tolist()}) > 1
    assert (state.draft.told == state.length).all()
    return decoder, model, state


def test_training_goes_on_from_a_folder_with_a_projection(folders):
    """With its layers and its projection; a line that says otherwise is refused."""
    target = models.load(folders / "target")
    folder = str(folders / "draft")
    task = lambda line: pard2_task(target, TrainOptions(drafter=line, output="", draft=folder, length=64), lambda: None)
    for line in ("pard2", "pard2:scale=0.2,target_layers=-1 -3 1"):
        made = task(line)
        assert made.objective.joined == JOINED
        jax.tree.map(np.testing.assert_array_equal, made.params["fc"], FC)
    for line, said in (("pard2:target_layers=-1 1", "target_layers is"), ("pard2:bias=false", "bias is False")):
        with pytest.raises(ValueError, match=f"pard2: {said}.* leave .* out to go on from it"):
            task(line)


@pytest.mark.slow
def test_drafts_are_those_of_transformers(midway, folders):
    """Embeddings of the whole text, plus the projected features of the token before each; masks have the last token's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    decoder, model, state = midway
    load = lambda name: transformers.AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float32).eval()
    target, draft = load("target"), load("draft")
    config, wanted = draft.config, []
    assert (config.spd_type, config.pard2_target_dim) == ("pard2", 192)
    for row, size in enumerate(state.length.tolist()):
        ids = torch.tensor([state.tokens[row, :size].tolist()])
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
            read = torch.cat([states[layer] for layer in config.pard2_target_layers], dim=-1)[0]
            read = torch.cat([torch.zeros(1, 192), read[:-1], *[read[-2:-1]] * 2])
            kernel, bias = (torch.tensor(np.asarray(FC[name])) for name in ("kernel", "bias"))
            text = torch.cat([ids, torch.full((1, 2), config.pard_token)], dim=1)
            embeds = draft.get_input_embeddings()(text) + config.pard2_scale * (read @ kernel + bias)
            wanted.append([int(ids[0, -1]), *draft(inputs_embeds=embeds).logits[0, -3:].argmax(dim=-1).tolist()])
    assert proposed(decoder, model, state).tree.tokens.tolist() == wanted


@pytest.mark.slow
def test_a_training_row_is_what_a_step_drafts(midway):
    """Rows of the last token and its masks, over whole texts."""
    decoder, model, state = midway
    drafts = proposed(decoder, model, state).tree.tokens[:, 1:]
    drafter = decoder.drafter
    objective = TrainPard2(TARGET, drafter.lm, mask=95, depths=3, keep=1.0, joined=JOINED, without=0.0)
    for row in (0, 2):
        size = int(state.length[row])
        batch = Batch(state.tokens[row : row + 1, :size], jnp.ones((1, size), bool))
        layout = objective.layout(batch, KEY)
        output = TARGET(model["target"], batch.block(), None, wants=objective.reads)
        final = objective.read(model["draft"], layout, batch, output, KEY)
        last = np.asarray(layout.anchor[0] == size - 1)
        assert layout.depth[last].tolist() == [0, 1, 2]
        assert drafter.lm.unembed(model["draft"]["lm"], final)[0, last].argmax(axis=-1).tolist() == drafts[row].tolist()


@pytest.mark.slow
def test_the_loss_is_that_of_its_rows():
    """To the target's distributions, and a tenth to the text, weighted by the target's chance of the tokens between."""
    batch, trained = packed(), OBJECTIVE.init(jax.random.key(2), tiny.target_params())
    layout = OBJECTIVE.layout(batch, KEY)
    output = tiny.TARGET(tiny.target_params(), batch.block(), None, wants=OBJECTIVE.reads | Wants(logits=True))
    q = jax.nn.log_softmax(tiny.DRAFT.unembed(trained["lm"], OBJECTIVE.read(trained, layout, batch, output, KEY)))
    p = jax.nn.log_softmax(output.logits)
    at, due = (np.asarray(x) for x in layout.targets(batch))
    tokens, total, whole = np.asarray(batch.tokens), 0.0, 0.0
    for row, r in zip(*np.nonzero(due), strict=True):
        anchor, depth = int(layout.anchor[row, r]), int(layout.depth[r])
        weight = np.exp(sum(p[row, anchor + i, tokens[row, anchor + i + 1]] for i in range(depth)))
        dist = p[row, at[row, r]]
        kl = (np.exp(dist) * (dist - q[row, r])).sum()
        total, whole = total + weight * (kl - 0.1 * q[row, r, tokens[row, at[row, r] + 1]]), whole + weight
    value, metrics = jax.jit(OBJECTIVE.loss)(trained, tiny.target_params(), batch, KEY)
    np.testing.assert_allclose(value, total / whole, rtol=1e-5)
    np.testing.assert_allclose(metrics["weight"], whole, rtol=1e-5)
    assert whole < due.sum()
    assert reached(layout, jnp.full((2, 14), 0.5), 3)[0].tolist() == [0.5 ** int(depth) for depth in layout.depth]


@pytest.mark.slow
def test_some_texts_are_read_without_features():
    """As a PARD model reads them."""
    batch, trained = packed(), OBJECTIVE.init(jax.random.key(2), tiny.target_params())
    output = tiny.TARGET(tiny.target_params(), batch.block(), None, wants=OBJECTIVE.reads)
    layout = OBJECTIVE.layout(batch, KEY)
    read = lambda share, key=KEY: dataclasses.replace(OBJECTIVE, without=share).read(
        trained, layout, batch, output, key
    )
    plain = TrainPard(tiny.TARGET, tiny.DRAFT, mask=31).read(trained["lm"], layout, batch, output, KEY)
    every = read(0.0)
    np.testing.assert_array_equal(read(1.0), plain)
    assert np.abs(every - plain).max() > 0.01
    seen = set()
    for seed in range(8):
        some = np.asarray(read(0.5, jax.random.key(seed)))
        for row in range(2):
            seen.add((row, bool((some[row] == every[row]).all()), bool((some[row] == plain[row]).all())))
    assert seen == {(row, kept, not kept) for row in range(2) for kept in (True, False)}
    held, _ = dataclasses.replace(OBJECTIVE, without=0.7).held_out(None)
    assert held.without == 0.0


@pytest.mark.slow
def test_the_command_makes_a_folder_that_drafts(tmp_path, capsys):
    """With features, and without them as a PARD model."""
    run = tiny.training(tmp_path)
    assert run("pard2") == 2 and "pard2 needs --draft" in capsys.readouterr().err
    assert run("pard2:target_layers=-1 5", "--draft", tmp_path / "draft") == 2
    assert "target_layers has 5, and a target of 2 layers gives features of -1 to -2" in capsys.readouterr().err
    assert run("pard2:depths=3,target_layers=-1 1,bias=true", "--draft", tmp_path / "draft") == 0
    target = models.load(tmp_path / "target")
    drafter, own = registry.build_drafter(f"pard2:model={tmp_path / 'out'},length=4", target)
    assert (drafter.joined, drafter.mask_id, drafter.depth) == (Joined((-1, 1), bias=True), 32, 4)
    assert own["fc"]["kernel"].shape == (64, 16) and own["fc"]["bias"].shape == (16,)
    plain, lm = registry.build_drafter(f"pard:model={tmp_path / 'out'},length=4", target)
    assert plain.mask_id == 32
    jax.tree.map(np.testing.assert_array_equal, lm, own["lm"])


@pytest.mark.slow
def test_published_folders(folders, tmp_path):
    """The projection in torch's format; what a folder must say; a configuration without weights."""
    torch = pytest.importorskip("torch")
    target = models.load(folders / "target")
    asked = lambda folder: registry.build_drafter(f"pard2:model={folder}", target)
    with pytest.raises(ValueError, match=r"names no layers of a target \(pard2_target_layers in config.json\)"):
        asked(folders / "target")
    fields, lm = joined_fields(95, JOINED, 192), params("pard2")["draft"]["lm"]
    folder = tmp_path / "draft"
    models.save(folder, DRAFTERS["pard2"].lm, lm, fields=fields)
    with pytest.raises(ValueError, match="looked for warp_model.safetensors"):
        asked(folder)
    tensors = {"target_proj.weight": torch.tensor(FC["kernel"].T.copy()), "target_proj.bias": torch.tensor(FC["bias"])}
    torch.save(tensors, folder / "warp_model.bin")
    drafter, own = asked(folder)
    assert (drafter.joined, drafter.depth) == (JOINED, 12)
    np.testing.assert_array_equal(own["fc"]["kernel"], FC["kernel"])
    np.testing.assert_array_equal(own["fc"]["bias"], FC["bias"])
    shapes = registry.build_drafter(f"pard2:model={folder}", models.abstract(folders / "target"))[1]["fc"]
    assert {name: x.shape for name, x in shapes.items()} == {"kernel": (192, 64), "bias": (64,)}
    plain = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"pard2_target_dim": 128}, "pard2_target_dim is 128, and 3 layers of 'target' have 192 features"),
        ({"pard2_target_layers": [-1, -9, 1]}, "target_layers has -9"),
        ({"pard2_target_layers": "all"}, "must be a list of layers"),
        ({"pard2_scale": "x"}, "pard2_scale must be a number"),
        (
            {"pard2_target_layers": [-1, 1], "pard2_target_dim": 128},
            r"the projection's kernel must have the shape \(128, 64\)",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(plain | change))
        with pytest.raises(ValueError, match=said):
            asked(folder)


@pytest.mark.slow
def test_over_fewer_tokens(midway):
    """The likeliest of the kept tokens."""
    decoder, model, state = midway
    kept = np.arange(0, 96, 2)
    drafter, own = trim(decoder.drafter, model, kept, 96)
    other = dataclasses.replace(decoder, drafter=drafter)
    tokens = proposed(other, {**model, "draft": own}, state).tree.tokens[:, 1:]
    assert (tokens % 2 == 0).all()
    whole = proposed(decoder, model, state).tree.tokens[:, 1:]
    assert (whole % 2 == 0).any() and (tokens == whole)[whole % 2 == 0].all()
    with pytest.raises(ValueError, match="trimmed already"):
        trim(drafter, {**model, "draft": own}, kept, 96)


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda: Joined((0,)).of(8), "target_layers has 0, and a target of 8 layers gives features of -1 to -8"),
        (lambda: dataclasses.replace(OBJECTIVE, without=1.5), "without must lie in"),
        (lambda: dataclasses.replace(OBJECTIVE, text=-1.0), "text must not be negative"),
    ),
)
def test_bad_settings(make, said):
    with pytest.raises(ValueError, match=said):
        make()
