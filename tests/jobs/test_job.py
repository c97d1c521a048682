"""Jobs over files: slots that are refilled, outputs that a kill does not harm, and what belongs to another job."""

import contextlib
import dataclasses
import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax import cli, decoder, models
from specjax.decode import Diffusion, Plain
from specjax.jobs import output as output_module
from specjax.jobs.manifest import fingerprint, named_folders
from specjax.models import LlamaLM, Masked, llama_config
from specjax.models.weights import write_arrays
from specjax.serve.engine import Engine
from specjax.serve.request import Record

CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=64)
COUNT = 12


def save(folder, diffusion=None, seed=0):
    lm = LlamaLM(CONFIG)
    models.save(folder, lm, jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(seed))), diffusion=diffusion)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"plain": save(folder / "plain"), "masked": save(folder / "masked", Masked(23, False))}


WORDS = {
    "plain": ["--drafter", "none", "--temperature", 1.0],
    "masked": ["--decode", "threshold:threshold=0.4,block_length=4", "--temperature", 1.0],
}


def write_input(path, count=COUNT):
    """Prompts of several lengths and equal ones, texts of several lengths, and a line that is none."""
    lines = [{"prompt": [1 + i % 4] * (1 + i % 2), "max_new_tokens": 4 * (1 + i * 7 % 5)} for i in range(count)]
    texts = [json.dumps(line) for line in lines]
    path.write_text("\n".join([*texts[:4], "{", *texts[4:-1]]) + "\n")
    return path


class Job:
    """One job in a folder of its own."""

    def __init__(self, folder, model, words, capsys):
        self.input, self.output = write_input(folder / "in.jsonl"), folder / "out.jsonl"
        self.model, self.words, self.capsys = model, words, capsys

    def run(self, *more):
        words = ["--model", self.model, "--input", self.input, "--output", self.output, "--batch-size", 3, *self.words]
        status = cli.main(["generate", *map(str, words), *map(str, more)])
        out, err = self.capsys.readouterr()
        assert out == ""
        return status, err

    def refused(self, *more):
        before = self.output.read_bytes()
        status, err = self.run(*more)
        assert status == 2 and err.count("\n") == 1 and self.output.read_bytes() == before
        return err


@pytest.fixture
def job(tmp_path, folders, capsys):
    return lambda kind="plain": Job(tmp_path, folders[kind], WORDS[kind], capsys)


@pytest.fixture
def asked(monkeypatch):
    """How many requests every run asked of the engine."""
    counts, original = [], Engine.turns
    monkeypatch.setattr(Engine, "turns", lambda self, r, **more: counts.append(len(r)) or original(self, r, **more))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_a_killed_job_goes_on_where_it_was(job, asked, kind):
    job = job(kind)
    status, err = job.run()
    whole = job.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert status == 1 and len(lines) == COUNT and asked == [COUNT - 1] and "in.jsonl, line 5: not valid JSON" in err
    assert [json.loads(line)["line"] for line in lines] == [*range(1, COUNT + 1)]
    first, last = (json.loads(lines[i]) for i in (2, -1))
    assert first["prompt"] == last["prompt"] and first["tokens"] != last["tokens"][: len(first["tokens"])]
    for cut in (len(lines[0]) + 7, len(whole) - 1, sum(map(len, lines[:6])), 0):
        job.output.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        status, err = job.run()
        assert status == 1 and job.output.read_bytes() == whole
        assert asked.pop() == COUNT - kept - (kept < 5)  # the bad line needs no engine
        assert (f"{kept} of {COUNT} records are in" in err) == (kept > 0)
    status, err = job.run()
    assert status == 1 and asked.pop() == 0 and job.output.read_bytes() == whole


def test_records_as_they_finish(job, asked):
    ordered = job()
    ordered.run()
    expected = sorted(ordered.output.read_bytes().splitlines())
    ordered.output.unlink()
    words = ("--unordered",)
    assert ordered.run(*words)[0] == 1
    whole = ordered.output.read_bytes()
    order = [json.loads(line)["line"] for line in whole.splitlines()]
    assert sorted(whole.splitlines()) == expected and order[0] == 5 and order != sorted(order)
    ordered.output.write_bytes(b"".join(whole.splitlines(keepends=True)[:7]) + b'{"prompt": [1')
    assert ordered.run(*words)[0] == 1 and asked.pop() == COUNT - 7
    again = ordered.output.read_bytes()
    assert sorted(again.splitlines()) == expected and again.startswith(b"".join(whole.splitlines(True)[:7]))
    assert 'output order ("as finished" there, "of the input" here)' in ordered.refused()


def test_several_completions_of_a_line_are_told_apart(job, asked):
    several = job()
    words = ("--num-return-sequences", 2, "--unordered")
    several.run(*words)
    whole = several.output.read_bytes().splitlines(keepends=True)
    several.output.write_bytes(b"".join(whole[:9]))
    several.run(*words)
    assert sorted(several.output.read_bytes().splitlines(keepends=True)) == sorted(whole)
    assert asked == [22, 22 - 8]
    samples = Counter((json.loads(line)["line"], json.loads(line).get("sample")) for line in whole)
    assert len(samples) == 23 and set(samples.values()) == {1}


def test_what_belongs_to_another_job_is_refused(job, folders, tmp_path):
    mine = job()
    mine.run()
    assert "differs in sampling temperature (1.0 there, 0.5 here): choose" in mine.refused("--temperature", 0.5)
    assert "differs in seed (0 there, 1 here): choose" in mine.refused("--seed", 1)
    assert 'decoding drafter ("none" there, "prompt_lookup" here)' in mine.refused("--drafter", "prompt_lookup")
    mine.model = save(tmp_path / "plain", seed=1)
    assert "differs in model fingerprint (" in mine.refused()
    mine.model = folders["plain"]
    mine.input.write_text(mine.input.read_text().replace("[1]", "[5]"))
    assert "differs in input sha256 (" in mine.refused()
    write_input(mine.input)
    assert mine.run("--batch-size", 2)[0] == 1
    manifest = Path(f"{mine.output}.job.json")
    kept = manifest.read_text()
    manifest.write_text("[]")
    assert "is not the manifest of a job" in mine.refused()
    manifest.write_text(kept)
    mine.output.write_bytes(mine.output.read_bytes().replace(b'"prompt": [2, 2]', b'"prompt": [2, 3]'))
    assert "line 2 of the output file" in mine.refused()
    manifest.unlink()
    assert "there is no 'out.jsonl.job.json' beside it" in mine.refused()


WAYS = (
    ({"drafter": "none"}, None),
    ({"decode": "none"}, None),
    ({"decode": {"name": "none"}, "drafter": None}, None),
    (
        {"decode": "beam:num_beams=2"},
        "it asks for decode 'beam:num_beams=2', and a job decodes all of its lines in one way",
    ),
    ({"drafter": {"name": "draft", "k": 2}}, """it asks for drafter '{"name": "draft", "k": 2}', and a job decodes"""),
    ({"decode": "frob"}, "unknown way to decode 'frob'; choose plain"),
    ({"drafter": "frob"}, "unknown drafter 'frob'; choose none"),
    ({"decode": 5}, "unknown way to decode '5'"),
    ({"decode": "none", "drafter": "none"}, "leave drafter out"),
    ({"verifier": "typical"}, "verifier is an option of all prompts together: take it out, and give --drafter"),
)


def test_a_line_may_say_how_its_job_decodes(job):
    """Another way is an error of that line; the others go on."""
    mine = job()
    mine.input.write_text("".join(json.dumps({"prompt": [1], "max_new_tokens": 2} | own) + "\n" for own, _ in WAYS))
    assert mine.run()[0] == 1
    records = [json.loads(line) for line in mine.output.read_text().splitlines()]
    for record, (own, said) in zip(records, WAYS, strict=True):
        assert (record["new_tokens"] == 2) == (said is None) and (said or "") in record.get("error", ""), own
    mine.input.write_text("".join(json.dumps({"prompt": [1], "max_new_tokens": 2}) + "\n" for own, _ in WAYS))
    assert "differs in input sha256 (" in mine.refused()


@pytest.mark.slow
def test_what_a_stepwise_method_writes_is_shown_at_its_end(capsys):
    """One prompt, whose text other ways show as it comes; and what the method refuses is one line."""
    words = [
        "generate",
        "def add(a, b):",
        "--decode",
        'astar:samples=1,width=1,separator="\n"',
        "--max-new-tokens",
        "4",
    ]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    shown, text = out.removeprefix("def add(a, b):").removesuffix("\n"), err.splitlines()[-1]
    assert shown and text.startswith("specjax: ") and " new tokens, " in text and "tokens/s" in text
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == shown
    assert cli.main([*words, "--json", "--prompt-logprobs"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "AStar keeps no log-probabilities: leave prompt_logprobs out" in err


def test_one_process_writes_an_output(job):
    mine = job()
    mine.run()
    manifest = json.loads(Path(f"{mine.output}.job.json").read_text())
    mine.output.write_bytes(b"")
    other = output_module.Output(mine.output, manifest, [])
    assert "another process is writing" in mine.refused()
    other.close()
    assert mine.run()[0] == 1


def test_a_full_disk_stops_the_job_and_loses_nothing(job, monkeypatch):
    mine = job()
    mine.run()
    whole = mine.output.read_bytes()
    mine.output.unlink()
    room, write = [len(whole) // 2], os.write

    def full(file, data):
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= taken
        return write(file, bytes(data[:taken]))

    with monkeypatch.context() as patch:
        patch.setattr(output_module.os, "write", full)
        status, err = mine.run()
    kept = mine.output.read_bytes()
    assert status == 2 and whole.startswith(kept) and kept.endswith(b"\n") and 0 < len(kept) < len(whole) // 2
    line = err.splitlines()[-1]
    assert "No space left on device" in line and f"holds {kept.count(bytes([10]))} of" in line
    assert mine.run()[0] == 1 and mine.output.read_bytes() == whole


def test_an_output_that_is_no_file(job):
    mine = job()
    mine.output = Path("/dev/full")
    status, err = mine.run()
    assert status == 2 and "No space left on device; 0 of 12 records were written" in err
    assert not Path("/dev/full.job.json").exists()


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupted_job_goes_on(job, monkeypatch, number, said):
    mine = job()
    mine.run()
    whole = mine.output.read_bytes()
    mine.output.unlink()
    append, before = output_module.Output.append, signal.getsignal(number)

    def interrupted(self, record):
        append(self, record)
        if record.line == 3:
            for _ in range(1 if number == signal.SIGINT else 2):  # a second Ctrl-C ends it at once
                os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(output_module.Output, "append", interrupted)
        status, err = mine.run()
    count = mine.output.read_bytes().count(b"\n")
    assert status == 128 + number and 3 <= count < COUNT and whole.startswith(mine.output.read_bytes())
    assert f"specjax: {said}; {mine.output} holds {count} of {COUNT} records, and the same command goes on" in err
    assert signal.getsignal(number) is before
    assert mine.run()[0] == 1 and mine.output.read_bytes() == whole


@pytest.mark.slow
def test_tables_in_and_out(job, asked, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    mine = job()
    mine.run()
    expected = [json.loads(line) for line in mine.output.read_text().splitlines()]
    lines = [json.loads(line) if line != "{" else {"id": "no prompt"} for line in mine.input.read_text().splitlines()]
    mine.input, mine.output = mine.input.with_name("in.parquet"), mine.output.with_name("out.parquet")
    keys = ("prompt", "max_new_tokens", "id")
    parquet.write_table(pyarrow.table({key: [line.get(key) for line in lines] for key in keys}), mine.input)
    status, err = mine.run()
    rows = parquet.read_table(mine.output).to_pylist()
    assert status == 1 and "in.parquet, line 5: it needs one of prompt and messages" in err
    assert [row["tokens"] for row in rows] == [record["tokens"] for record in expected]
    journal = Path(f"{mine.output}.jsonl")
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:7]))
    mine.output.unlink()
    assert mine.run()[0] == 1 and parquet.read_table(mine.output).to_pylist() == rows and asked[-1] == COUNT - 7
    journal.unlink()
    assert "exists: move it away" in mine.refused()
    mine.input.write_text("no table")
    mine.output.unlink()
    assert "cannot read the input file" in mine.run()[1]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install 'specjax[parquet]'" in mine.run()[1]


def test_compressed_files_in_and_out(job, asked):
    mine = job()
    mine.run()
    whole, plain = mine.output.read_bytes(), mine.input
    mine.input, mine.output = plain.with_name("in.jsonl.gz"), plain.with_name("out.jsonl.gz")
    mine.input.write_bytes(gzip.compress(plain.read_bytes()))
    status, err = mine.run()
    assert status == 1 and "in.jsonl.gz, line 5: not valid JSON" in err
    content = mine.output.read_bytes()
    assert gzip.decompress(content) == whole
    journal = Path(f"{mine.output}.jsonl")
    journal.write_bytes(whole[: len(whole) // 2])
    mine.output.unlink()
    assert mine.run()[0] == 1 and mine.output.read_bytes() == content
    assert 0 < asked[-1] < COUNT - 1
    journal.unlink()
    assert "exists: move it away" in mine.refused()
    mine.output.unlink()
    for broken in (gzip.compress(plain.read_bytes())[:-20], b"{}", content[:30] + b"\0" * 40 + content[70:]):
        mine.input.write_bytes(broken)
        status, err = mine.run()
        assert status == 2 and err.count("\n") == 1 and "cannot read the input file" in err


@pytest.mark.slow
def test_lines_on_stdin_and_records_on_stdout(job, folders, monkeypatch, capsys):
    mine = job()
    mine.run()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(mine.input.read_bytes())))
    words = ["generate", "--model", folders["plain"], "--input", "-", "--output", "-", *mine.words]
    before = set(Path().iterdir())
    assert cli.main(list(map(str, words))) == 1
    out, err = capsys.readouterr()
    assert out.encode() == mine.output.read_bytes() and "error: -, line 5: not valid JSON" in err
    assert set(Path().iterdir()) == before  # no file of that name
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xff"}\n' + b"[" * 100_000)))
    assert cli.main(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "no valid line; line 1: not valid UTF-8" in err


def test_pipes(folders, tmp_path, capsys):
    """An input that can be read once; an output whose reader has gone is an end, not a wait."""
    source = tmp_path / "in"
    os.mkfifo(source)
    with subprocess.Popen(["sh", "-c", 'echo "$1" > "$0"', source, '{"prompt": [1], "max_new_tokens": 2}']):
        words = ["generate", "--model", folders["plain"], "--drafter", "none", "--input", source, "--json"]
        assert cli.main([str(word) for word in words]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 2
    ends = os.pipe()
    out = output_module.Output(f"/dev/fd/{ends[1]}", {}, [])
    os.close(ends[0])
    with pytest.raises(BrokenPipeError):
        out.append(Record.failed(None, "no"))
    out.close()
    os.close(ends[1])


def test_folders_that_a_line_names_belong_to_the_job(folders):
    folder = folders["plain"]
    lines = [
        f"prompt_lookup:length=3+draft:model={folder}",
        f"none:verifier=(judge:model={folder})",
        f"none:verifier=judge:model={folder}",
        json.dumps({"name": "plain", "steer": {"name": "contrastive", "amateur": str(folder)}}),
    ]
    for each in lines:
        assert named_folders([each, None, 3]) == {str(folder): fingerprint(folder)}


def test_records_reach_the_disk_in_time(tmp_path, monkeypatch):
    now, synced = [0.0], []
    monkeypatch.setattr(output_module.time, "monotonic", lambda: now[0])
    out = output_module.Output(tmp_path / "out.jsonl", {}, [])
    monkeypatch.setattr(output_module.os, "fsync", lambda file: synced.append(out._unsynced))
    for _ in range(8):
        out.append(Record.failed(None, "no"))
        out.tick()
    assert synced == [8]
    out.append(Record.failed(None, "no"))
    out.tick()
    assert synced == [8]
    now[0] = 2.0
    out.tick()
    out.tick()
    assert synced == [8, 1]
    out.close()


@pytest.mark.parametrize("code", (errno.EINVAL, errno.ENOSYS, errno.EIO))
def test_a_file_system_without_fsync(tmp_path, monkeypatch, code):
    """Files, folders and weights are written all the same; an error of the disk is one."""

    def fsync(file):
        raise OSError(code, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    path, broken = tmp_path / "out.jsonl", code == errno.EIO
    with pytest.raises(OSError) if broken else contextlib.nullcontext():
        write_arrays(tmp_path / "a.safetensors", {"x": np.zeros(2, np.float32)})
    with pytest.raises(OSError) if broken else contextlib.nullcontext():
        out = output_module.Output(path, {"seed": 0}, [Record.failed(None, "no", id=3, line=1)])
    if not broken:
        out.append(Record.failed(None, "no", id=3, line=1))
        out.sync()
        out.close()
        assert json.loads(path.read_text())["id"] == 3 and output_module.manifest_path(path).exists()
        again = output_module.Output(path, {"seed": 0}, [Record.failed(None, "no", id=3, line=1)])
        assert again.done == {0: True}
        again.close()


def test_a_fingerprint_sees_other_weights(folders, tmp_path):
    same, other = save(tmp_path / "same"), save(tmp_path / "other", seed=1)
    assert fingerprint(same) == fingerprint(folders["plain"]) != fingerprint(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_refilled_slots_write_the_texts_of_static_batches(folders, kind):
    engine = Engine(str(folders[kind]), Plain() if kind == "plain" else Diffusion(block_length=4))
    prompts = [([1 + i % 5] * (1 + i), 4 * (1 + i * 3 % 7)) for i in range(10)]
    requests = [
        engine.request(p, max_new_tokens=n, temperature=0.5 * (i % 3), ignore_eos=True)
        for i, (p, n) in enumerate(prompts)
    ]
    keys, capacity, needs = engine.keys(requests), engine.capacity(requests), decoder.Needs()

    def decode(order, size):
        records, fill = {}, []
        for at in range(0, len(order), size):
            part = order[at : at + size]
            for turn in engine.turns(
                [requests[i] for i in part], slots=3, keys=keys[part], capacity=capacity, needs=needs
            ):
                records |= {part[i]: record for i, record in turn.finished}
                assert turn.steps <= 3 * turn.passes
                fill.append((turn.steps, turn.passes))
        return [records[i].tokens for i in range(10)], [sum(column) for column in zip(*fill, strict=True)]

    order = list(range(10))
    refilled, (steps, passes) = decode(order, 10)
    compiled = decoder.run_program._cache_size(), decoder.insert_program._cache_size()
    static, (_, static_passes) = decode(order, 3)
    backwards, _ = decode(order[::-1], 10)
    assert refilled == static == backwards and [len(t) for t in refilled] == [n for _, n in prompts]
    assert (decoder.run_program._cache_size(), decoder.insert_program._cache_size()) == compiled
    assert passes < static_passes and steps / passes > 2  # of three
    assert [r.tokens for r in engine.run(requests, batch_size=3)] == refilled


class Letters:
    """A tokenizer that can only decode: a letter a token."""

    def decode(self, ids, **options):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.mark.slow
def test_text_comes_as_it_is_written_and_stops_free_a_slot(folders):
    model = dataclasses.replace(models.load(folders["plain"]), tokenizer=Letters())
    engine = Engine(model, drafter="none")

    def ask(**more):
        counts = enumerate((30, 12, 30, 20))
        return [engine.request([i], max_new_tokens=n, temperature=1.0, **more) for i, n in counts]

    free = [record.text for record in engine.run(ask(), batch_size=2)]
    stop = free[0][5:8]
    shown = dict.fromkeys(range(4), "")

    def on_text(index, text):
        shown[index] += text

    records = list(engine.run(ask(stop=[stop]), batch_size=2, on_text=on_text))
    assert [record.text for record in records] == [text.split(stop)[0] for text in free]
    assert records[0].finish_reason == "stop" and len(records[0].tokens) == 8
    assert list(shown.values()) == [record.text for record in records]


def kill(folder, kills, *words):
    """The driver's report: what every run was asked for, and how it ended."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
    }
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "killed_job.py"),
        str(folder),
        str(kills),
        *map(str, words),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count", "kills"), [("plain", 80, 8), ("masked", 40, 4), ("tiny-draft", 8, 1)])
def test_kills_at_random_moments(folders, tmp_path, kind, count, kills):
    words = WORDS.get(kind, ["--max-new-tokens", 8, "--drafter", "none"])
    if kind in folders:
        write_input(tmp_path / "in.jsonl", count)
    else:
        prompts = [{"prompt": f"def f{i}(a, b):\n    return", "id": f"f{i}"} for i in range(count)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    runs = kill(tmp_path, kills, "--model", folders.get(kind, kind), "--batch-size", 2, *words)
    assert len(runs) >= kills + 2  # one that finished the job, and one of an uninterrupted job
    killed, (last, whole) = runs[:-2], runs[-2:]
    assert all(run["status"] == -signal.SIGKILL for run in killed) and len(killed) == kills
    assert last["status"] == whole["status"] == (1 if kind in folders else 0)
    bad = 5 if kind in folders else count + 1
    for run in [*killed, last]:
        assert run["asked"] == count - run["before"] - (run["before"] < bad <= count)
    fields = ("id", "prompt", "text", "tokens", "finish_reason", "line")
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    records = [
        [{name: record.get(name) for name in fields} for record in read(name)] for name in ("out.jsonl", "whole.jsonl")
    ]
    assert records[0] == records[1] and len(records[0]) == count
