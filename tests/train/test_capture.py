"""`specjax capture`: what a target says of text, on disk; heads that are trained on it are those trained beside the target."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import killed_write
from support import small_training as tiny
from support.objectives import DRAWN, FIXED, frozen, packed

from specjax import cli, models
from specjax.lm import Wants
from specjax.objectives.base import Batch, read
from specjax.objectives.teacher import spread_evenly
from specjax.train import capture
from specjax.train.data import batches
from specjax.train.features import Features, named

ALL = FIXED | DRAWN
CAPTURED = [name for name, objective in ALL.items() if objective.reads is not None]
QUICK, SLOW = ("eagle3", "kangaroo"), pytest.mark.slow
SMALL = ["--steps", 3, "--batch-size", 4, "--checkpoint-every", 3]


def without_layers(params):
    return {name: part for name, part in params.items() if name != "layers"}


def as_captured(objective, top_k=0):
    """The packed rows with what an objective reads."""
    said = capture.said_of(tiny.TARGET, objective.reads, top_k, "float32", tiny.target_params(), packed())
    return dataclasses.replace(packed(), output=said)


def test_which_objectives_run_the_target_themselves():
    """And `lm` and `s2d` read nothing of it."""
    assert {name for name in ALL if name not in CAPTURED} == {
        "gemma4_assistant",
        "hidden_transfer",
        "joint",
        "lm",
        "lm_sparsity",
        "longspec",
        "ppd",
        "s2d",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CAPTURED])
def test_losses_are_those_beside_the_target(name):
    """To float32, and with no parameters of the target's layers."""
    objective, whole = ALL[name], frozen(name)
    params = objective.init(jax.random.key(0), whole)
    bare = (without_layers(whole[0]), *whole[1:]) if isinstance(whole, tuple) else without_layers(whole)
    loss = jax.jit(lambda target, batch: objective.loss(params, target, batch, jax.random.key(1)))
    (expected, metrics), (got, others) = loss(whole, packed()), loss(bare, as_captured(objective))
    assert float(got) == pytest.approx(float(expected), rel=1e-6) and float(got) > 0
    for key, value in metrics.items():
        assert float(others[key]) == pytest.approx(float(value), rel=1e-6), key


@pytest.mark.parametrize("name", ["medusa", pytest.param("dflash", marks=SLOW)])
def test_all_likeliest_tokens_are_the_distribution(name):
    objective = ALL[name]
    params = objective.init(jax.random.key(0), frozen(name))
    loss = jax.jit(lambda batch: objective.loss(params, frozen(name), batch, jax.random.key(1)))
    batch = as_captured(objective, top_k=tiny.TARGET.vocab_size)
    assert batch.output.topk[1].shape == (2, 14, 32)
    (got, others), (expected, metrics) = loss(batch), loss(packed())
    assert float(got) == pytest.approx(float(expected), rel=1e-5)
    assert {key: float(x) for key, x in others.items()} == pytest.approx(
        {key: float(x) for key, x in metrics.items()}, rel=1e-5
    )


def test_what_is_left_of_a_distribution_is_spread_evenly():
    p = np.random.default_rng(0).dirichlet(np.ones(8), size=3)
    values, ids = jax.lax.top_k(jnp.log(p), 3)
    dist = np.exp(np.asarray(spread_evenly(8, (values, ids))))
    for row in range(3):
        best = np.argsort(-p[row])[:3]
        expected = np.full(8, (1 - p[row][best].sum()) / 5)
        expected[best] = p[row][best]
        np.testing.assert_allclose(dist[row], expected, rtol=1e-5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, another one, and text in token ids."""
    folder = tmp_path_factory.mktemp("files")
    models.save(folder / "target", tiny.TARGET, tiny.target_params())
    models.save(folder / "other", tiny.TARGET, jax.tree.map(lambda x: 2 * x, tiny.target_params()))
    rng = np.random.default_rng(0)
    for name, count in (("data", 24), ("more", 6)):
        lines = [{"prompt": [1, 2], "tokens": rng.integers(1, 32, 9).tolist()} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(capsys, files):
    """Runs a command on the tiny target and gives its status and stderr."""

    def go(name, *words, target="target"):
        words = [name, *words, "--target", files / target]
        status = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return go


@pytest.fixture
def refused(run):
    def go(*words, **options):
        status, err = run(*words, **options)
        assert status == 2 and err.startswith("specjax: error: ") and err.count("\n") == 1, err
        return err

    return go


def words(files, out, data="data", drafter="eagle3"):
    own = ["--data", files / f"{data}.jsonl", "--length", 12, "--batch-size", 4, "--save-dtype", "float32"]
    return ["capture", drafter, *own, "--output", out]


def content(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_on_captured_features_is_that_beside_the_target(run, refused, files, tmp_path, monkeypatch):
    assert run(*words(files, tmp_path / "cap"))[0] == 0
    assert run(*words(files, tmp_path / "held", "more"))[0] == 0
    given = ["--features", tmp_path / "cap", "--held-out", tmp_path / "held", *SMALL]
    text = ["--data", files / "data.jsonl", "--length", 12, "--held-out", files / "more.jsonl", *SMALL]
    passes = []
    call = models.LlamaLM.__call__
    monkeypatch.setattr(
        models.LlamaLM, "__call__", lambda self, *args, **more: passes.append(1) or call(self, *args, **more)
    )
    status, err = run("train", "eagle3:unroll=2", "--output", tmp_path / "a", *given, "--draft-vocabulary", 16)
    assert status == 0 and "24 rows of 12 tokens" in err and not passes
    status, err = run("train", "eagle3:unroll=2", "--output", tmp_path / "b", *text, "--draft-vocabulary", 16)
    assert status == 0 and passes
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-5)
    record = lambda name: json.loads((tmp_path / name / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record("a")["held_out_merit"] == pytest.approx(record("b")["held_out_merit"], rel=1e-4)


def test_a_stopped_capture_goes_on_and_its_folder_is_the_same(run, refused, files, tmp_path, monkeypatch):
    """Stopped as it was about to put a file in its place, which is half written beside it."""
    go = [*words(files, tmp_path / "whole"), "--rows-per-file", 4]
    assert run(*go)[0] == 0
    whole = content(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in whole) == 6
    go[go.index(tmp_path / "whole")] = tmp_path / "stopped"
    replace = os.replace

    def dies(source, target):
        if Path(target).name == "rows-00002.safetensors":
            Path(source).write_bytes(b"half")
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dies)
        assert run(*go)[0] == 130
    out = ["--output", tmp_path / "out"]
    assert "is incomplete, rows-00002.safetensors is missing" in refused(
        "train", "eagle3", "--features", tmp_path / "stopped", *out
    )
    status, err = run(*go)
    assert status == 0 and "8 rows were there" in err
    assert content(tmp_path / "stopped") == whole


@pytest.mark.slow
def test_sigkill_in_the_midst_of_a_capture(run, files, tmp_path):
    """In the index, in the first file of rows or in a later one."""
    go = [*words(files, tmp_path / "whole"), "--rows-per-file", 1]
    assert run(*go)[0] == 0
    go[go.index(tmp_path / "whole")] = tmp_path / "killed"
    for number in (1, 2, 9):
        command = [sys.executable, killed_write.__file__, number, *go, "--target", files / "target"]
        path = os.pathsep.join(sys.path)  # as the tests have it
        killed = subprocess.run(
            list(map(str, command)), env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
        )
        assert killed.returncode == -signal.SIGKILL
    status, err = run(*go)
    assert status == 0 and "rows were there" in err
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.slow
def test_rows_are_read_one_at_a_time(run, files, tmp_path):
    """And are those that the target makes; the order goes on where it stopped, with threads that read ahead."""
    assert run(*words(files, tmp_path / "cap"), "--rows-per-file", 5, "--top-k", 3)[0] == 0
    target = models.load(files / "target", layers=False)
    rows = Features.open(tmp_path / "cap", target).reading("eagle3", FIXED["eagle3"])
    stored = load_file(tmp_path / "cap" / "rows-00001.safetensors")
    got = rows[7]
    assert set(stored) == {"tokens", "mask", "documents", *named(got["output"])} and got["output"].final is None
    for name, array in named(got["output"]).items():
        np.testing.assert_array_equal(array, stored[name][2])
    batch = Batch(*(jnp.asarray(got[name])[None] for name in ("tokens", "mask", "documents")))
    output = read(tiny.TARGET, tiny.target_params(), batch, Wants(logits=True, hidden=FIXED["eagle3"].drafter.taps))
    np.testing.assert_allclose(got["output"].hidden[0], output.hidden[0][0], rtol=1e-4, atol=1e-5)
    best = jax.lax.top_k(jax.nn.log_softmax(output.logits[0]), 3)
    np.testing.assert_allclose(got["output"].topk[0], best[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got["output"].topk[1], best[1])
    order = lambda stream, count: [next(stream)["tokens"].tolist() for _ in range(count)]
    stream = batches(rows, 5, seed=3, ahead=2)
    order(stream, 4)
    state = json.loads(json.dumps(stream.get_state()))
    after = order(stream, 4)
    fresh = batches(rows, 5, seed=3, ahead=2)
    fresh.set_state(state)
    assert order(fresh, 4) == after == order(batches(rows, 5, seed=3), 8)[4:]


def test_folders_that_cannot_be_used(run, refused, files, tmp_path):
    go = words(files, tmp_path / "cap")
    assert run(*go)[0] == 0
    out = ["--output", tmp_path / "out", *SMALL]
    said = refused("train", "eagle3", "--features", tmp_path / "cap", *out, target="other")
    assert "features of the target 'target', and 'other' is another one" in said
    assert "holds no captured features: give a folder" in refused("train", "eagle3", "--features", files, *out)
    assert "and the rows of" in refused("train", "eagle3", "--features", tmp_path / "cap", "--length", 16, *out)
    assert run(*words(files, tmp_path / "top"), "--top-k", 2)[0] == 0
    assert "has no final, which medusa reads; it has hidden.0" in refused(
        "train", "medusa", "--features", tmp_path / "top", *out
    )
    assert "ppd runs the target's layers while it trains" in refused(
        "train", "ppd", "--features", tmp_path / "cap", *out
    )
    assert "not --data and --features" in refused(
        "train", "eagle3", "--features", tmp_path / "cap", "--data", files / "data.jsonl", *out
    )
    assert "give one of --data, --prompts or --features" in refused("train", "eagle3", *out)
    assert not (tmp_path / "out").exists()
    assert "differs in target files" in refused(*go, target="other")
    assert "length (12 there, 16 here)" in refused(*go, "--length", 16)
    assert "differs in data" in refused(*words(files, tmp_path / "cap", "more"))
    assert "arrays topk.ids (not given there" in refused(*go, "--top-k", 2)
    assert "ppd runs the target's layers while it trains" in refused(*words(files, tmp_path / "x", drafter="ppd"))
    assert "cannot capture for 'distill'; choose medusa" in refused(*words(files, tmp_path / "x", drafter="distill"))
    assert "--top-k 33 is more than the 32 tokens" in refused(*words(files, tmp_path / "x"), "--top-k", 33)
    (tmp_path / "cap" / "index.json").unlink()
    assert "holds rows but no index.json" in refused(*go)


def test_features_that_do_not_fit_float16(run, files, tmp_path):
    params = tiny.target_params()
    models.save(files / "huge", tiny.TARGET, {**params, "embed": jax.tree.map(lambda x: 1e6 * x, params["embed"])})
    go = words(files, tmp_path / "huge")
    assert run(*go, target="huge")[0] == 0
    status, said = run(*words(files, tmp_path / "half"), "--save-dtype", "float16", target="huge")
    assert status == 2 and "larger than float16 holds (65,504): give --save-dtype bfloat16" in said.splitlines()[-1]
    assert not list((tmp_path / "half").glob("rows-*"))


@pytest.mark.slow
def test_prompts_are_answered_by_the_targets_own_distribution(run, tmp_path):
    """As `specjax generate --temperature 1` does, and what was answered is not answered again."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{n}(x):"}) + "\n" for n in range(4)))
    shipped = Path(models.__file__).parent / "pretrained" / "tiny"
    out, answers = tmp_path / "out", tmp_path / "answers.jsonl"
    own = ["--prompts", prompts, "--max-new-tokens", 12, "--length", 32, *SMALL]
    assert run("train", "medusa:heads=2", *own, "--output", out, target=shipped)[0] == 0
    ask = ["--input", prompts, "--output", answers, "--temperature", 1, "--max-new-tokens", 12, "--model", shipped]
    assert cli.main(["generate", *map(str, ask)]) == 0
    written = (out / "training" / "answers.jsonl").read_bytes()
    assert written == answers.read_bytes() and written.count(b"\n") == 4
    (out / "config.json").unlink()
    status, err = run("train", "medusa:heads=2", *own, "--output", out, "--resume", target=shipped)
    assert status == 0 and "4 of 4 records are in" in err
    status, err = run("train", "medusa", "--prompts", tmp_path / "none", "--output", tmp_path / "x", target=shipped)
    assert status == 2 and "no prompts at" in err
