"""A draft model that learns while a job runs: the texts stay, the folder goes on, and other folders are refused."""

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
from support.two_tokenizers import pair

from specjax import cli, models
from specjax.models import LlamaLM, llama_config


def save(folder, layers, seed):
    lm = LlamaLM(llama_config(24, 16, 24, layers, 2, 1, 8, max_position_embeddings=64))
    models.save(folder, lm, jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(seed))))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    lines = [{"prompt": [1 + i % 7, 1 + i % 5], "max_new_tokens": 8} for i in range(24)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return save(folder / "target", 2, 0), save(folder / "draft", 1, 1), folder / "in.jsonl"


def words(folders, output, *more):
    target, draft, lines = folders
    own = ["--model", target, "--drafter", f"draft:model={draft},length=3", "--input", lines, "--output", output]
    return ["generate", *map(str, own), "--batch-size", "4", *map(str, more)]


def texts(file):
    return [json.loads(line)["tokens"] for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_are_those_of_a_draft_that_does_not_learn(folders, tmp_path, temperature):
    options = ["--temperature", temperature]
    assert cli.main(words(folders, tmp_path / "plain.jsonl", *options)) == 0
    learn = tmp_path / "learn"
    assert cli.main(words(folders, tmp_path / "a.jsonl", *options, "--learn", learn)) == 0
    assert texts(tmp_path / "a.jsonl") == texts(tmp_path / "plain.jsonl")
    before = load_file(learn / "learnt.safetensors")
    assert len(before["losses"]) == 3
    # another job goes on with the folder, and the draft model in it is one that a drafter takes
    assert cli.main(words(folders, tmp_path / "b.jsonl", *options, "--learn", learn)) == 0
    after = load_file(learn / "learnt.safetensors")
    assert len(after["losses"]) == 6 and (after["losses"][:3] == before["losses"]).all()
    (name,) = [name for name in after if name.startswith("['draft']") and "embed" in name]
    assert np.abs(after[name] - before[name]).max() > 0
    again = words((folders[0], learn, folders[2]), tmp_path / "c.jsonl", *options)
    assert cli.main(again) == 0 and texts(tmp_path / "c.jsonl") == texts(tmp_path / "plain.jsonl")
    # a draft may go on learning in its own folder, and the same command finds its job again
    for _ in range(2):
        own = words((folders[0], learn, folders[2]), tmp_path / "d.jsonl", *options, "--learn", learn)
        assert cli.main(own) == 0 and texts(tmp_path / "d.jsonl") == texts(tmp_path / "plain.jsonl")
    assert len(load_file(learn / "learnt.safetensors")["losses"]) == 9


@pytest.mark.slow
def test_a_killed_job_goes_on_with_what_was_learnt(folders, tmp_path):
    output, learn = tmp_path / "out.jsonl", tmp_path / "learn"
    many = tmp_path / "many.jsonl"
    many.write_text(folders[2].read_text() * 12)
    own = (*folders[:2], many)
    command = [sys.executable, "-m", "specjax", *words(own, output, "--learn", learn)]
    running = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not (learn / "learnt.safetensors").exists() and running.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = load_file(learn / "learnt.safetensors")["losses"]
    assert 0 < len(before) < 36
    assert cli.main(words(own, output, "--learn", learn)) == 0
    assert cli.main(words(own, tmp_path / "plain.jsonl")) == 0
    assert texts(output) == texts(tmp_path / "plain.jsonl")
    after = load_file(learn / "learnt.safetensors")["losses"]
    assert len(after) > len(before) and (after[: len(before)] == before).all()


@pytest.mark.slow
def test_each_domain_has_its_own_draft(folders, tmp_path, capsys):
    """Its draft is the one that learns from its lines alone, in another job; lines without a domain have the folder's own."""
    lines = [json.loads(line) for line in folders[2].read_text().splitlines()] * 2
    kinds = [("code", None, "list-2")[i % 3] for i in range(len(lines))]
    mixed = [line | ({"domain": kind} if kind else {}) for line, kind in zip(lines, kinds, strict=True)]
    write = lambda file, lines: file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(tmp_path / "mixed.jsonl", mixed)
    own = (*folders[:2], tmp_path / "mixed.jsonl")
    learn, output = tmp_path / "learn", tmp_path / "out.jsonl"
    assert cli.main(words(own, output, "--learn", learn)) == 0
    useless = "lines have a domain, which only drafts that learn have a use for"
    assert useless not in capsys.readouterr().err
    assert cli.main(words(own, tmp_path / "plain.jsonl")) == 0
    assert useless in capsys.readouterr().err
    assert texts(output) == texts(tmp_path / "plain.jsonl")
    found = {kind: load_file(learn / (kind or "") / "learnt.safetensors") for kind in set(kinds)}
    for kind in ("code", "list-2"):
        write(tmp_path / "one.jsonl", [line for line in mixed if line.get("domain") == kind])
        alone = tmp_path / f"alone-{kind}"
        assert (
            cli.main(words((*folders[:2], tmp_path / "one.jsonl"), tmp_path / f"{kind}.jsonl", "--learn", alone)) == 0
        )
        again = load_file(alone / kind / "learnt.safetensors")
        assert len(again["losses"]) == len(found[kind]["losses"]) == 2
        for name, array in again.items():
            np.testing.assert_allclose(array, found[kind][name], rtol=1e-5, atol=1e-6)
        assert models.load(alone / kind).lm.num_layers == 1
        assert not (alone / "learnt.safetensors").exists()
    assert (found["code"]["losses"] != found["list-2"]["losses"]).all()
    # a second job goes on with all three
    assert cli.main(words(own, tmp_path / "again.jsonl", "--learn", learn)) == 0
    for kind, before in found.items():
        after = load_file(learn / (kind or "") / "learnt.safetensors")["losses"]
        assert len(after) == 4 and (after[:2] == before["losses"]).all()


@pytest.mark.slow
def test_a_draft_of_another_vocabulary_learns(tmp_path, capsys):
    """Its folder has its own tokenizer, and another job goes on with the draft in it."""
    for model in pair():
        models.save(tmp_path / model.name, model.lm, model.params, None, model.tokenizer, model.eos_ids)
    prompts = ("the cat", "abcdxy", "hi the", "efab")
    lines = [{"prompt": prompts[i % 4], "max_new_tokens": 8} for i in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output, learn = tmp_path / "out.jsonl", tmp_path / "learnt"

    def job(*more, again=False):
        if not again:
            output.unlink(missing_ok=True)
        own = ["--model", tmp_path / "target", "--input", tmp_path / "in.jsonl", "--output", output]
        return cli.main(["generate", *map(str, (*own, "--batch-size", 4, *more))])

    assert job("--drafter", "none") == 0
    plain = texts(output)
    assert job("--drafter", f"omnidraft:model={tmp_path / 'draft'},length=3", "--learn", learn) == 0
    assert texts(output) == plain
    before = load_file(learn / "learnt.safetensors")
    assert len(before["losses"]) == 1 and len(before["tokens"]) == 4
    kept, draft = models.load(learn), pair()[1]
    assert kept.tokenizer.get_vocab() == draft.tokenizer.get_vocab() and kept.eos_ids == draft.eos_ids
    assert job("--drafter", f"omnidraft:model={learn},length=3", "--learn", learn) == 0 and texts(output) == plain
    after = load_file(learn / "learnt.safetensors")["losses"]
    assert len(after) == 3 and after[0] == before["losses"][0]
    # with a head, in a folder of its own
    other = tmp_path / "other"
    line = f"omnidraft:model={tmp_path / 'draft'},length=3,rule=acceptance,layers=1"
    assert job("--drafter", line, "--learn", other) == 0 and texts(output) == plain
    ruled = f"omnidraft:model={other},length=3,rule=acceptance,head={other / 'acceptance.head'}"
    assert job("--drafter", ruled, "--learn", other) == 0 and texts(output) == plain
    assert job("--drafter", ruled, "--learn", other, again=True) == 0  # the head has changed, the job is the same
    found = load_file(other / "learnt.safetensors")
    assert (
        len(found["losses"]) == 3 and found["drafted"].shape[1:] == (512,) and any("['head']" in name for name in found)
    )
    assert job("--drafter", ruled.replace("length=3", "length=2")) == 0 and texts(output) == plain
    assert job("--drafter", f"omnidraft:model={other},rule=online", "--learn", tmp_path / "no") == 2
    assert "is none that learns: give" in capsys.readouterr().err
    assert job("--drafter", line) == 2
    assert "acceptance needs a head: train one" in capsys.readouterr().err
    assert job("--drafter", f"draft:model={tmp_path / 'draft'}", "--learn", tmp_path / "no") == 2
    assert (
        "is none that learns: give --drafter draft:model=FOLDER, or omnidraft:model=FOLDER for"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("domains", "error"),
    [
        ([str(i) for i in range(33)], "keeps a draft for each of at most 32 domains, and these lines have 33"),
        (["../up"], "line 1: domain must be a word of letters, digits, - and _, got '../up'"),
    ],
    ids=["many", "path"],
)
def test_domains_that_cannot_be(folders, tmp_path, capsys, domains, error):
    lines = [{"prompt": [1, 2], "max_new_tokens": 2, "domain": domain} for domain in domains]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = words(
        (*folders[:2], tmp_path / "in.jsonl"), tmp_path / "out.jsonl", "--learn", tmp_path / "learn", "--strict"
    )
    assert cli.main(own) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--drafter", "none"], "'none' is none that learns: give --drafter draft:model=FOLDER, or omnidraft"),
        (["--drafter", "prompt_lookup"], "--learn teaches a draft model, and 'prompt_lookup' is none that learns"),
        (["--decode", "beam"], "--learn teaches a draft model: name it, such as --drafter draft"),
        (["--ray", "local"], "--learn is for a job of one process"),
        (["--drafter", "draft:model=DRAFT,verifier=rejection"], "leave the verifier out, or choose coupled"),
    ],
    ids=["none", "prompt_lookup", "beam", "ray", "rejection"],
)
def test_what_does_not_learn(folders, tmp_path, capsys, more, error):
    own = words(folders, tmp_path / "out.jsonl", "--learn", tmp_path / "learn")
    if "--decode" in more or "--drafter" in more:
        at = own.index("--drafter")
        own = own[:at] + own[at + 2 :]
    assert cli.main([*own, *(word.replace("DRAFT", str(folders[1])) for word in more)]) == 2
    said = capsys.readouterr().err
    assert error in said and "Traceback" not in said and not (tmp_path / "learn").exists()


def test_a_folder_of_another_draft_is_refused(folders, tmp_path, capsys):
    own = words((folders[0], folders[1], folders[2]), tmp_path / "out.jsonl", "--learn", tmp_path / "learn")
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn" / "learnt.safetensors").write_bytes(b"no file of tensors")
    assert cli.main(own) == 2
    assert "cannot read what a draft learnt from" in capsys.readouterr().err
    before = {file.name: file.read_bytes() for file in folders[1].iterdir()}
    assert cli.main([*own[:-1], str(folders[1])]) == 2
    assert "holds a model that would be replaced: name another folder" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folders[1].iterdir()} == before
    (tmp_path / "file").write_text("")
    assert cli.main([*own[:-1], str(tmp_path / "file")]) == 2
    assert "is a file: name a folder" in capsys.readouterr().err
