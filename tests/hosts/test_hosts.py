"""Options of jobs over many hosts, and what is read from the end of a member."""

import argparse
import os

import jax
import numpy as np
import pytest

from specjax import cli
from specjax.jobs import hosts
from specjax.sharding import distributed, make_mesh


def refused(capsys, *words):
    status = cli.main(["generate", "--model", "pycode", "x", *map(str, words)])
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1
    return err


def test_options_that_need_others(capsys):
    assert "--process-id goes with --coordinator HOST:PORT" in refused(capsys, "--process-id", 1)
    assert "needs --mesh" in refused(capsys, "--distributed")
    assert "not both" in refused(capsys, "--distributed", "--mesh", "data=8", "--ray", "local")
    assert "--ray maps --input FILE.jsonl" in refused(capsys, "--ray", "local")
    assert "--ray-workers is how many engines --ray starts" in refused(capsys, "--ray-workers", 2)


def test_bad_places_are_refused_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match="HOST:PORT"):
        distributed.initialize("somewhere", 2, 0)
    with pytest.raises(ValueError, match="process ids go from 0 to 1"):
        distributed.initialize("localhost:1", 2, 2)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES is 'two'"):
        distributed.initialize("localhost:1")
    assert not jax.distributed.is_initialized()


def test_one_process_asks_nobody():
    assert distributed.is_first() and distributed.anywhere(True) and not distributed.anywhere(False)
    assert distributed.from_first(np.arange(3)).tolist() == [0, 1, 2]
    place = jax.sharding.NamedSharding(make_mesh("data=8"), jax.P("data"))
    there = distributed.to_devices(np.arange(16), place)
    assert there.sharding == place and distributed.to_host({"x": there})["x"].tolist() == list(range(16))


FATAL = "F1122 12:00:00 1 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
ENDS = {
    FATAL + "The following tasks are unhealthy (stopped sending heartbeats):\n3\nThe tasks": "process 3",
    FATAL + "Either the leader task was preempted": "process 0, the coordinator,",
    FATAL + "Something else": "another process",
    FATAL
    + "Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/RegisterTask": "the processes did not find",
}


@pytest.mark.parametrize("text", ENDS)
def test_who_died_is_read_from_what_jax_says(text, capfdbinary):
    ours, native = os.pipe()
    os.write(native, b"a warning\n" + text.encode() + b"\n    @ 0x7f965b440634 (unknown)\n")
    os.close(native)
    line = hosts._end(hosts._listen(ours), argparse.Namespace(output="out.jsonl", ray=None))
    assert line.startswith(ENDS[text] + " ") and "\n" not in line
    assert capfdbinary.readouterr().err == b"a warning\n"  # what comes before it is passed on
