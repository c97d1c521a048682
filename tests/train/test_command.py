"""`specjax train`: from files to a folder that the drafters read, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import slow_disk

from specjax import cli, models
from specjax.assembly.companions import Ruled, Stored
from specjax.assembly.registry import build_drafter
from specjax.draft import Acceptance, Eagle
from specjax.draft.eagle.objective import TrainEagle
from specjax.draft.eagle3.objective import TrainEagle3
from specjax.jobs import hosts
from specjax.train import several
from specjax.train.command import as_published
from specjax.train.loop import Run, Settings
from specjax.train.options import TrainOptions

CONFIG = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"num_key_value_heads": 1}
SMALL = ["--steps", 4, "--batch-size", 4, "--length", 12, "--learning-rate", 0.01, "--checkpoint-every", 1]


def save(folder, seed=0, vocab=32, width=16, longest=64):
    lm = models.LlamaLM(models.llama_config(vocab, width, 24, 1, 2, 1, 8, max_position_embeddings=longest))
    models.save(folder, lm, jax.tree.map(lambda leaf: 3 * leaf, jax.jit(lm.init)(jax.random.key(seed))))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a draft, data in token ids, and a draft's shape."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    lines = [{"prompt": [1, 2], "tokens": rng.integers(1, 32, 9).tolist()} for _ in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "words"}]))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save(folder / "target", 1, width=32)
    save(folder / "draft", 2)
    return folder


@pytest.fixture
def train(capsys, files):
    """Runs `specjax train` on the tiny target and gives its status and stderr; nothing may be on stdout."""

    def go(*words, data=None):
        data = files / "data.jsonl" if data is None else data
        words = ["train", *words, "--target", files / "target", "--data", data]
        status = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return go


@pytest.fixture
def refused(train):
    def go(*words, **options):
        status, err = train(*words, **options)
        assert status == 2 and err.startswith("specjax: error: ") and err.count("\n") == 1
        return err

    return go


def losses(folder):
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_distill_writes_a_draft_that_the_registry_reads(train, files, tmp_path):
    out, picture = tmp_path / "out", tmp_path / "loss.png"
    words = ["distill:temperature=0.5", "--draft", files / "draft", "--output", out, *SMALL]
    status, err = train(*words, "--loss", "jsd:beta=0.2", "--plot", picture)
    assert status == 0, err
    assert "16 rows of 12 tokens, 144 to predict, 4 steps of 4 rows" in err
    assert "left out 1 lines of the data, the first: " in err and "has no tokenizer" in err
    assert "over the first and the last 1 of 4 steps: loss" in err and f"written to {out}" in err
    assert len(losses(out)) == 4 and picture.read_bytes().startswith(b"\x89PNG")
    for name in ("step", "loss", "acceptance", "lr", "tokens"):
        assert name in json.loads((out / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    before, after = models.load(files / "draft"), models.load(out)
    assert after.lm == before.lm and after.dtype == "float32"
    assert (after.params["embed"]["embedding"] != before.params["embed"]["embedding"]).any()
    drafter, params = build_drafter(f"draft:model={out}", models.load(files / "target"))
    assert drafter.lm == after.lm
    jax.tree.map(np.testing.assert_array_equal, params, after.params)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_killed(train, refused, files, tmp_path, monkeypatch):
    words = ["distill", "--draft-config", files / "config.json", "--output", tmp_path / "a", *SMALL]
    assert train(*words)[0] == 0
    words[4] = tmp_path / "b"
    save, saved = Run.save, []

    def killed(run, state, position):
        save(run, state, position)
        saved.append(int(state.step))
        if saved == [1, 2, 3]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save", killed)
    status, err = train(*words)
    assert status == 130 and err.endswith("specjax: interrupted\n")
    assert saved == [1, 2, 3] and not (tmp_path / "b" / "config.json").exists()
    assert "has a run stopped after step 3: resume it" in refused(*words)
    assert "its learning_rate was 0.01 and is 0.1 now" in refused(*words, "--learning-rate", 0.1, "--resume")
    assert "its objective was" in refused(*words, "--loss", "tvd", "--resume")
    status, err = train(*words, "--resume")
    assert status == 0 and "of 1 steps" in err
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    a, b = models.load(tmp_path / "a"), models.load(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.mark.slow
def test_sigkill_in_the_midst_of_training(files, tmp_path):
    """Wherever it strikes, between checkpoints or within one."""

    def start(folder, *more):
        words = [
            "train",
            "distill",
            "--draft",
            files / "draft",
            "--target",
            files / "target",
            "--data",
            files / "data.jsonl",
        ]
        words += ["--output", folder, *SMALL, "--steps", 120, "--checkpoint-every", 3, *more]
        words = [sys.executable, "-m", "specjax", *map(str, words)]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    for folder, least in (("whole", None), ("killed", 20), ("killed", 70)):
        taken_up = ["--resume"] if least == 70 else []
        process = start(tmp_path / folder, *taken_up)
        metrics = tmp_path / folder / "training" / "metrics.jsonl"
        while least is not None and (not metrics.exists() or metrics.read_text().count("\n") < least):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)  # without it, this process takes a core from the other
        if least is not None:
            process.kill()
        _, err = process.communicate()
        assert (process.returncode == 0) == (least is None), err
    process = start(tmp_path / "killed", "--resume")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 120
    whole, killed = (models.load(tmp_path / folder).params for folder in ("whole", "killed"))
    jax.tree.map(np.testing.assert_array_equal, whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ("killed", "full"))
def test_an_end_in_the_midst_of_a_checkpoint(train, files, tmp_path, how):
    """The one before it is what a run goes on from."""
    of = ["distill", "--draft", files / "draft", *SMALL]
    given = ["train", *of, "--output", tmp_path / "ended", "--target", files / "target", "--data", files / "data.jsonl"]
    words = [sys.executable, slow_disk.__file__, how, 3, *given]
    path = os.pathsep.join(sys.path)  # as the tests have it
    ended = subprocess.run(
        list(map(str, words)), env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == {"killed": -signal.SIGKILL, "full": 1}[how], ended.stderr
    if how == "full":
        said = [line for line in ended.stderr.splitlines() if line.startswith("specjax: ")]
        assert "No space left on device); the one of step 2 is kept" in said[-1]
    kept = sorted(path.name.partition(".")[0] for path in (tmp_path / "ended" / "training" / "checkpoints").iterdir())
    assert kept == ["1", "2", "3"]  # of the last one, a part
    status, err = train(*of, "--output", tmp_path / "ended", "--resume")
    assert status == 0 and "of 2 steps" in err, err
    assert train(*of, "--output", tmp_path / "whole")[0] == 0
    assert losses(tmp_path / "ended") == losses(tmp_path / "whole")
    whole, ended = (models.load(tmp_path / folder).params for folder in ("whole", "ended"))
    jax.tree.map(np.testing.assert_array_equal, whole, ended)


def test_selection_needs_a_reference_of_the_drafts_shape(train, refused, files, tmp_path):
    words = ["--draft", files / "draft", "--output", tmp_path / "out", *SMALL]
    assert "keep below 1 and --reference" in refused("distill:keep=0.4", *words)
    assert "keep below 1 and --reference" in refused("distill", *words, "--reference", files / "draft")
    assert "not a model of the draft's shape" in refused("distill:keep=0.4", *words, "--reference", files / "target")
    assert train("distill:keep=0.4", *words, "--reference", files / "draft")[0] == 0


@pytest.mark.slow
def test_heads_are_written_with_their_fields(train, refused, files, tmp_path):
    """And training goes on from them, with their fields and their vocabulary. What they take from the target is not stored."""
    out = tmp_path / "out"
    words = ["medusa:heads=4,decay=0.5,own_head=false", "--output", out, *SMALL]
    assert "has no field 'frob'; it has heads, layers, own_head, decay" in refused("medusa:frob=1", *words[1:])
    assert "are for draft models, not for medusa" in refused(*words, "--draft", files / "draft")
    assert "cannot keep 99 of 32" in refused(*words, "--draft-vocabulary", 99)
    half = ["--draft-vocabulary", 16, "--save-dtype", "float16", "--compute-dtype"]
    status, err = train(*words, *half, "bfloat16")
    assert status == 0, err
    said = "its compute_dtype was 'bfloat16' and is 'float32' now"
    assert said in refused(*words, *half, "float32", "--resume")
    config = json.loads((out / "config.json").read_text())
    assert config["drafter"] == "medusa" and config["fields"] == {"heads": 4, "layers": 1, "own_head": False}
    assert config["torch_dtype"] == "float16"
    drafter, params = build_drafter(f"medusa:model={out}", models.load(files / "target"))
    assert drafter.heads == 4 and len(params["ids"]) == 16 and np.all(np.diff(params["ids"]) > 0)
    written = set(load_file(out / "model.safetensors"))
    assert params["kernel"].shape[1] == 16 and written.isdisjoint({"kernel", "heads.0.kernel"}) and len(written) == 9
    words = ["medusa", "--start", out, "--output", tmp_path / "more", *SMALL, "--steps", 1]
    assert "was made with heads=4, so it cannot be 2" in refused("medusa:heads=2", *words[1:])
    assert "the head of --start has its own" in refused(*words, "--draft-vocabulary", 8)
    status, err = train(*words, "--learning-rate", 1e-12, "--save-dtype", "float16")  # moves nothing that is written
    assert status == 0, err
    _, others = build_drafter(f"medusa:model={tmp_path / 'more'}", models.load(files / "target"))
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.slow
def test_held_out_text_in_metrics_and_picture(train, refused, files, tmp_path):
    out, picture = tmp_path / "out", tmp_path / "loss.png"
    words = ["medusa:heads=2", "--output", out, *SMALL, "--plot", picture]
    assert "give it with --held-out" in refused(*words, "--patience", 1)
    assert "--held-out has the text of --data" in refused(*words, "--held-out", files / "data.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(line + "\n" for line in (files / "data.jsonl").read_text().splitlines()[-4:]))
    fast = ["--learning-rate", 3, "--steps", 40]  # nothing gets better
    status, err = train(*words, "--held-out", other, "--patience", 3, "--accumulate", 2, *fast)
    assert status == 0, err
    assert "3 rows of held-out text, 27 tokens of it to predict" in err
    assert "left out 1 lines of the held-out text, the first: " in err
    assert "of 40: 3 checkpoints were no better on held-out text" in err
    assert "best on the held-out text after step " in err and "acceptance_2 0." in err
    record = json.loads((out / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"held_out_loss", "held_out_acceptance", "held_out_acceptance_2", "held_out_agreement_1"} <= record.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_head_of_acceptance_ends_drafts(train, refused, files, tmp_path):
    out = tmp_path / "out"
    words = ["acceptance:layers=1,reject=2", "--output", out, *SMALL]
    assert "acceptance needs --draft" in refused(*words)
    short = save(tmp_path / "short", 2, longest=8)
    assert "--length 12 is more than the draft's 8 positions" in refused(*words, "--draft", short)
    assert "--loss is not for acceptance" in refused(*words, "--draft", files / "draft", "--loss", "tvd")
    status, err = train(*words, "--draft", files / "draft")
    assert status == 0, err
    target, line = models.load(files / "target"), f"draft:model={files / 'draft'},rule=acceptance"
    drafter, params = build_drafter(f"{line},head={out},threshold=0.5,length=3", target)
    assert drafter.rule.layers == 1 and drafter.rule.threshold == 0.5 and drafter.length == 3
    shapes = jax.eval_shape(drafter.rule.init_params, jax.random.key(0), params["drafter"])
    assert jax.tree.map(np.shape, params["rule"]) == jax.tree.map(np.shape, shapes)
    with pytest.raises(ValueError, match="acceptance needs a head: train one"):
        build_drafter(line, target)
    with pytest.raises(ValueError, match="was trained for .* is another model"):
        build_drafter(f"draft:model={save(tmp_path / 'other', 3)},rule=acceptance,head={out}", target)
    with pytest.raises(ValueError, match="reads the features of a draft model, and Eagle has none"):
        Ruled(Eagle(), Stored(Acceptance, str(out), {}), 3).load(target)


def test_clipping_is_the_authors_where_nothing_else_is_asked_for():
    asked = lambda **more: TrainOptions(drafter="", data=(), output="", **more)
    got = lambda kind, **more: as_published(Settings(steps=1), asked(**more), kind.recipe)
    assert got(TrainEagle) == Settings(steps=1, clip=0.5, clip_by="value", weight_decay=0.01)
    assert got(TrainEagle3) == Settings(steps=1, clip=0.5)
    own = {"clip": 2.0, "clip_by": "norm", "weight_decay": 0.0}
    assert got(TrainEagle, **own) == Settings(steps=1, clip=2.0)


def test_what_many_processes_cannot_do_together(monkeypatch):
    monkeypatch.setattr(hosts, "check_same", lambda named: None)
    asked = lambda **more: TrainOptions(drafter="", output="", mesh="data=4,model=2", **more)
    several.check(asked(), (), 4, "--batch-size")
    with pytest.raises(ValueError, match=r"does not split 2 rows \(--batch-size\) into 4 equal parts"):
        several.check(asked(), (), 2, "--batch-size")
    with pytest.raises(ValueError, match="--prompts is for one process"):
        several.check(asked(prompts="x.jsonl"), (), 4, "--batch-size")


def test_nan_ends_the_run_with_one_line(train, tmp_path):
    lm = models.LlamaLM(models.llama_config(32, 16, 24, 1, 2, 1, 8, max_position_embeddings=64))
    params = jax.jit(lm.init)(jax.random.key(0))
    params["norm"]["scale"] = params["norm"]["scale"].at[0].set(np.nan)
    models.save(tmp_path / "nan", lm, params)
    out = tmp_path / "out"
    status, err = train("distill", "--draft", tmp_path / "nan", "--output", out, *SMALL)
    assert status == 1 and "error: the loss of step 1 is not finite" in err.splitlines()[-1]
    assert not (out / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frob"], "cannot train 'frob'; choose distill"),
        (["distill"], "distill needs one of --draft (a small model) and --draft-config"),
        (["distill:frob=1", "--draft", "{draft}"], "has no field 'frob'; it has temperature, on_policy, prompt, keep"),
        (["distill:on_policy=2", "--draft", "{draft}"], "distill: on_policy must lie in [0, 1]"),
        (["distill", "--draft", "{draft}", "--loss", "frob"], "unknown loss 'frob'; choose forward_kl"),
        (["distill", "--draft", "{draft}", "--loss", "jsd:beta=1"], "loss jsd: beta must lie between 0 and 1"),
        (["distill", "--draft", "tiny-draft"], "the draft model has 1536 tokens and the target 32"),
        (["distill", "--draft", "{draft}", "--draft-vocabulary", "8"], "--draft-vocabulary is for heads"),
        (["distill", "--draft", "{draft}", "--start", "x"], "--start is for heads"),
        (["distill", "--draft-config", "{data}"], "is not valid JSON"),
        (["distill", "--draft-config", "missing.json"], "--draft-config 'missing.json': No such file"),
        (["distill", "--draft", "{draft}", "--compute-dtype", "bfloat16"], "is for heads with layers of their own"),
        (["distill", "--draft", "{draft}", "--length", "65"], "--length 65 is more than the 64 positions"),
        (["distill", "--draft", "{draft}", "--length", "1"], "--length must be at least 2"),
        (["distill", "--draft", "{draft}", "--steps", "0"], "steps must be at least 1"),
        (["distill", "--draft", "{draft}", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["distill", "--draft", "{draft}", "--accumulate", "3"], "--accumulate 3 does not divide --batch-size 8"),
        (["distill", "--draft", "{draft}", "--learning-rate", "-1"], "learning_rate must be a positive number"),
        (["distill", "--draft", "missing", "--clip", "0"], "clip must be a positive number"),
        (["distill", "--draft", "{draft}", "--save-dtype", "int4"], "unknown dtype 'int4'"),
        (["distill", "--draft", "{draft}", "--mesh", "data=3"], "asks for 3 devices"),
        (["distill", "--draft", "{draft}", "--distributed"], "a job of many processes needs --mesh"),
        (["distill", "--draft", "{draft}", "--process-id", "1"], "--process-id goes with --coordinator HOST:PORT"),
        (["distill", "--draft", "{draft}", "--resume"], "nothing to resume"),
        (["distill", "--draft", "{draft}", "--plot", "x.frob"], "--plot 'x.frob'"),
    ],
)
def test_bad_input_is_one_line(refused, files, tmp_path, words, said):
    names = {"{draft}": files / "draft", "{data}": files / "data.jsonl"}
    assert said in refused("--length", 12, *(names.get(word, word) for word in words), "--output", tmp_path / "out")


def test_output_and_data_that_cannot_be_used(refused, files, tmp_path):
    words = ["distill", "--draft", files / "draft", "--length", 12, "--output"]
    assert "is a file; give a folder" in refused(*words, files / "data.jsonl")
    assert "holds a model already" in refused(*words, files / "draft")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert f"{empty} has no usable line: it is empty" in refused(*words, tmp_path / "out", data=empty)


def test_help(capsys):
    assert cli.main(["train", "--help"]) == 0
    assert "--checkpoint-every" in capsys.readouterr().out
