"""Training in two processes: the losses and the head of one."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import processes
from support.processes import end, pair, start

from specjax import cli

HEAD = "eagle3:unroll=2"
SHORT = ["--steps", 4, "--batch-size", 4, "--length", 12, "--learning-rate", 0.01, "--checkpoint-every", 2]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The options of a run over a tiny target, with text that is held out, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("training")
    rng = np.random.default_rng(0)
    for name, count in (("data", 17), ("other", 6)):
        lines = [{"prompt": [1, 2], "tokens": rng.integers(1, 24, 9).tolist()} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [HEAD, "--target", processes.save(folder / "target"), "--data", folder / "data.jsonl", *SHORT]
    words += ["--held-out", folder / "other.jsonl", "--accumulate", 2, "--draft-vocabulary", 16]
    assert cli.main(["train", *map(str, [*words, "--output", folder / "one"])]) == 0
    return folder, words


def said(err):
    """The lines of the command."""
    return [line for line in err.splitlines() if line.startswith("specjax: ")]


def metrics(folder):
    return [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]


def same(folder, other):
    """The losses and the head."""
    ours, theirs = metrics(folder), metrics(other)
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([*one.values()], [*two.values()], rtol=1e-5, atol=1e-6)
    assert json.loads((folder / "config.json").read_text()) == json.loads((other / "config.json").read_text())
    tensors = [load_file(home / "model.safetensors") for home in (folder, other)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *tensors)


@pytest.mark.slow
def test_two_processes_train_what_one_trains(given):
    """And one process goes on from a checkpoint that both wrote."""
    folder, words = given
    words = [*words, "--output", folder / "two", "--mesh", "data=2"]
    with pair(*words, command="train", devices=1) as both:
        ended = [end(process) for process in both]
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert [out for _, out, _ in ended] == ["", ""]
    assert "written to" in said(ended[0][2])[-1] and not said(ended[1][2]), ended  # one of them speaks
    same(folder / "two", folder / "one")
    (folder / "two" / "config.json").unlink()
    shutil.rmtree(folder / "two" / "training" / "checkpoints" / "4")
    status, _, err = end(start(*words, "--resume", command="train"))
    assert status == 0 and "of 2 steps" in err, err
    same(folder / "two", folder / "one")


@pytest.mark.slow
def test_two_processes_capture_what_one_captures(given, tmp_path, capfd):
    """And one process goes on from the files that they wrote."""
    folder, words = given
    words = [HEAD, *words[1:5], "--length", 12, "--batch-size", 4, "--save-dtype", "float32", "--rows-per-file", 3]
    assert cli.main(["capture", *map(str, [*words, "--output", tmp_path / "one"])]) == 0
    words += ["--output", tmp_path / "two", "--mesh", "data=2"]
    with pair(*words, command="capture", devices=1) as both:
        ended = [end(process) for process in both]
    assert [(status, out) for status, out, _ in ended] == [(0, "")] * 2, ended
    assert said(ended[0][2])[-1].endswith(f"train with --features {tmp_path / 'two'}") and not said(ended[1][2]), ended
    files = sorted(file.name for file in (tmp_path / "one").glob("*.*"))
    assert files == sorted(file.name for file in (tmp_path / "two").glob("*.*")) and len(files) > 3
    (tmp_path / "two" / files[-1]).unlink()
    kept = (tmp_path / "two" / files[-2]).stat().st_mtime_ns
    capfd.readouterr()
    assert cli.main(["capture", *map(str, words[:-2])]) == 0 and "rows were there" in capfd.readouterr().err
    assert (tmp_path / "two" / files[-2]).stat().st_mtime_ns == kept
    assert (tmp_path / "one" / "index.json").read_text() == (tmp_path / "two" / "index.json").read_text()
    for name in files[1:]:
        one, two = (load_file(tmp_path / home / name) for home in ("one", "two"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


@pytest.mark.slow
def test_processes_that_cannot_train_together(given):
    folder, words = given
    words = [*words, "--output", folder / "refused", "--mesh", "data=2"]
    with pair(*words, own=(("--seed", 1), ("--seed", 2)), command="train", devices=1) as both:
        for status, out, err in [end(process) for process in both]:
            assert (status, out, len(said(err))) == (2, "", 1), err
            assert "process 1 was given another --seed than process 0" in err
    assert not (folder / "refused").exists()
