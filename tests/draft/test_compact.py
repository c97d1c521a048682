"""A draft model of few tokens: one with all tokens that are alike beyond those, with its head cut, is the same draft."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, complete, params, plain, same
from support.conformance import TARGET as CONFORMANCE
from support.published import toy
from support.shapes import changed
from support.small_training import TARGET, target_params

from specjax import cli, models
from specjax.assembly.registry import build_drafter
from specjax.bench.peers.folders import draft_of
from specjax.draft import ModelDrafter
from specjax.draft.compact import CompactLM
from specjax.draft.heads.compact_folder import save_compact
from specjax.draft.heads.widening import widen_head
from specjax.draft.trim import trimmed_model
from specjax.expand import Chain, TopK
from specjax.lm import Block, Wants
from specjax.models.errors import ModelError
from specjax.models.llama import LlamaLM
from specjax.objectives.base import Batch, read
from specjax.train.distill import Distill

V = CONFIG.vocab_size
IDS = np.arange(1, V - 3)
BLOCK = Block(np.asarray([[5, 7, V - 1, 0]]), np.arange(4)[None], np.zeros((1,), np.int32))


def compact():
    """The target's lower layers, with a table of the tokens `IDS` and one row more."""
    lm = CompactLM(LlamaLM(changed(CONFIG, num_hidden_layers=2, vocab_size=len(IDS) + 1)), vocab_size=V)
    own = params()["target"]
    table = np.asarray(own["embed"]["embedding"])
    table = np.concatenate([table[IDS], table[:1]])
    layers = {i: own["layers"][i] for i in range(2)}
    return lm, {"lm": {**own, "layers": layers, "embed": {"embedding": jnp.asarray(table)}}, "ids": jnp.asarray(IDS)}


def test_it_reads_and_writes_what_the_whole_model_does():
    lm, own = compact()
    whole, its = lm.whole(own)
    of = lambda lm, own: lm(own, BLOCK, None, wants=Wants(logits=True)).logits
    few, every = of(lm, own), of(whole, its)
    assert few.shape == (1, 4, len(IDS)) and every.shape == (1, 4, V)
    np.testing.assert_allclose(few, every[..., IDS], atol=1e-5)
    others = np.setdiff1d(np.arange(V), IDS)
    np.testing.assert_allclose(every[..., others], np.repeat(few[..., :1], len(others), -1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("expander", [Chain(3), TopK(3, 2)], ids=["chain", "tree"])
def test_it_drafts_what_a_cut_head_drafts(expander):
    lm, own = compact()
    found = {}
    for name, (draft, its) in {"compact": (lm, own), "cut": trimmed_model(*lm.whole(own), IDS)}.items():
        got, state = complete(ModelDrafter(draft, expander), model={"target": params()["target"], "draft": its})
        same(got, plain())
        found[name] = int(np.asarray(state.stats.steps).sum()), sum(map(len, got))
    assert found["compact"] == found["cut"] and found["cut"][0] < 0.8 * found["cut"][1]


@pytest.mark.slow
def test_a_folder_is_read_for_its_target_alone(tmp_path):
    lm, own = compact()
    target = toy()
    save_compact(tmp_path / "few", lm, own, target, "float32")
    drafter, its = build_drafter(f"draft:model={tmp_path / 'few'},length=3", target)
    assert drafter.lm == lm
    jax.tree.map(np.testing.assert_array_equal, its, jax.tree.map(np.asarray, own))
    shapes = build_drafter(
        f"draft:model={tmp_path / 'few'},length=3",
        dataclasses.replace(target, params=jax.eval_shape(lambda: target.params)),
    )[1]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, its)
    other = dataclasses.replace(target, params=jax.tree.map(lambda x: x + 1, target.params))
    with pytest.raises(ModelError, match="was trained for the target"):
        build_drafter(f"draft:model={tmp_path / 'few'}", other)
    with pytest.raises(ValueError, match="takes 200 candidates per node and the draft model has only"):
        build_drafter(f"draft:model={tmp_path / 'few'},expander=top_k,k=200", target)


@pytest.mark.slow
def test_what_it_learns_is_its_share_of_the_targets_distribution():
    """Acceptance is the sum of min(p, q) over its tokens, and a gradient reaches the row of all others."""
    ids = tuple(range(2, 32, 3))
    draft = CompactLM(LlamaLM(changed(TARGET.config, num_hidden_layers=1, vocab_size=len(ids) + 1)), vocab_size=32)
    objective = Distill(TARGET, draft, ids=ids)
    own = jax.jit(objective.init)(jax.random.key(0), target_params())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)))
    batch = Batch(tokens, jnp.ones(tokens.shape, bool))
    loss = jax.jit(
        jax.value_and_grad(lambda p: objective.loss(p, target_params(), batch, jax.random.key(0)), has_aux=True)
    )
    (_, metrics), gradient = loss(own)
    probs = lambda lm, p: jax.nn.softmax(read(lm, p, batch, Wants(logits=True)).logits[:, :-1])
    p, q = probs(TARGET, target_params()), probs(draft, objective.export(own))
    np.testing.assert_allclose(metrics["acceptance"], jnp.minimum(p[..., list(ids)], q).sum(-1).mean(), rtol=1e-5)
    assert np.abs(gradient["lm"]["embed"]["embedding"][-1]).max() > 0
    with pytest.raises(ValueError, match="for drafts with all tokens"):
        Distill(TARGET, draft, ids=ids, keep=0.5)


@pytest.mark.slow
def test_a_command_makes_one(tmp_path, capsys):
    models.save(tmp_path / "target", TARGET, target_params())
    rng = np.random.default_rng(0)
    lines = [{"prompt": [1, 2], "tokens": rng.integers(1, 32, 9).tolist()} for _ in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    words = ["train", "distill", "--draft-config", tmp_path / "shape.json", "--draft-vocabulary", 12, "--steps", 2]
    words += ["--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--batch-size", 4, "--length", 12]
    assert cli.main([*map(str, words), "--output", str(tmp_path / "few")]) == 0
    drafter, own = build_drafter(f"draft:model={tmp_path / 'few'}", models.load(tmp_path / "target"))
    assert drafter.lm.kept == len(own["ids"]) == 12 and drafter.lm.vocab_size == 32
    again = [*words[:2], *words[6:], "--draft", tmp_path / "few", "--output", tmp_path / "other"]
    assert cli.main([*map(str, again)]) == 2 and "starts from --draft-config" in capsys.readouterr().err
    (tmp_path / "shape.json").write_text(json.dumps({**shape, "vocab_size": 32}))
    assert cli.main([*map(str, words), "--output", str(tmp_path / "other")]) == 2
    assert "has a vocab_size, and --draft-vocabulary says another" in capsys.readouterr().err


def test_it_is_widened_as_it_is():
    lm, own = compact()
    drafter, wide = widen_head(ModelDrafter(lm).bind(CONFORMANCE), own, 2)
    assert isinstance(drafter.lm, CompactLM) and drafter.lm.vocab_size == V and drafter.lm.kept == lm.kept
    of = lambda lm, own: lm(own, BLOCK, None, wants=Wants(logits=True)).logits
    np.testing.assert_allclose(of(drafter.lm, wide), of(lm, own), atol=1e-4)


def test_another_program_gets_the_whole_model():
    lm, own = compact()
    engine = type("Engine", (), {})()
    engine.decoder = type("Decoder", (), {"drafter": ModelDrafter(lm)})()
    engine.params = {"draft": own}
    whole, _ = draft_of(engine)
    assert whole.vocab_size == V and not whole.config.head.tied
