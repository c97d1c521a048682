"""A job over a Ray cluster: the records of a plain job, each once, though a worker is killed."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from support import processes
from support.processes import end, running, start, wait_for_records

from specjax import cli

COUNT = 64
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'specjax[ray]'"
)


def workers_of(driver):
    """The processes below a driver that Ray Data gave its work to; their numbers are in no order where a machine's ran out."""
    children, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
    below = [driver]
    for process in below:
        below += children.get(process, [])
    return [process for process in below[1:] if titles[process].startswith("ray::MapWorker")]


def test_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    source = processes.write_input(tmp_path / "in.jsonl", 2)
    words = ["generate", "--input", source, "--output", tmp_path / "out.jsonl", "--ray", "local"]
    assert cli.main(list(map(str, words))) == 2
    assert "--ray needs Ray on every machine: pip install 'specjax[ray]'" in capsys.readouterr().err


@needs_ray
@pytest.mark.slow
def test_a_killed_worker_costs_no_record(tmp_path, capfd):
    model, source = processes.save(tmp_path / "model"), processes.write_input(tmp_path / "in.jsonl", COUNT)
    words = ["--model", model, "--input", source, "--batch-size", 2, *processes.LOOKUP]
    assert cli.main(["generate", *map(str, words), "--output", str(tmp_path / "plain.jsonl")]) == 1
    summary = capfd.readouterr().err.splitlines()
    output = tmp_path / "out.jsonl"
    with running(*words, "--output", output, "--ray", "local", "--ray-workers", 2) as driver:
        wait_for_records(output, driver)
        before = output.read_bytes().count(b"\n")
        os.kill(workers_of(driver.pid)[0], signal.SIGKILL)
        status, out, err = end(driver)
    assert (status, out, len(err.splitlines())) == (1, "", len(summary)), err  # the bad line, and the summary
    assert before < COUNT and output.read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


@needs_ray
@pytest.mark.slow
def test_a_cluster_that_is_not_there(tmp_path):
    source = processes.write_input(tmp_path / "in.jsonl", 2)
    for address in ("127.0.0.1:1", "auto"):
        status, out, err = end(start("--input", source, "--output", tmp_path / "out.jsonl", "--ray", address))
        assert (status, out, err.count("\n")) == (2, "", 1) and f"no Ray cluster at {address!r}" in err
