"""Options of jobs over many hosts, and what is read from the end of a member."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax import cli
from specjax.jobs import fleet, hosts
from specjax.jobs.options import RayOptions
from specjax.models import ModelError
from specjax.serve.engine import Engine
from specjax.sharding import distributed, make_mesh


def refused(capsys, *words):
    status = cli.main(["generate", "--model", "tiny", "x", *map(str, words)])
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
    assert distributed.from_first(np.arange(3)).tolist() == [0, 1, 2] and distributed.largest(3) == 3
    place = jax.sharding.NamedSharding(make_mesh("data=8"), jax.P("data"))
    there = distributed.to_devices(np.arange(16), place)
    distributed.meet(make_mesh("data=4,model=2"))
    assert there.sharding == place and distributed.to_host({"x": there})["x"].tolist() == list(range(16))


def test_an_engine_connects_its_processes_before_any_of_them_compiles(monkeypatch):
    """One that compiles for longer than Gloo waits for a first contact would end the others."""
    met = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "meet", met.append)
    with pytest.raises(ModelError, match="unknown model 'nowhere'"):
        Engine("nowhere", mesh="data=4,model=2")
    assert met == [make_mesh("data=4,model=2")]


MACHINES = ({"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0})


@pytest.mark.parametrize(("mesh", "workers"), ((None, 8), ("model=2", 4), ("model=3", 2), ("model=8", None)))
def test_a_worker_fits_on_one_machine(mesh, workers):
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": machine} for machine in MACHINES])
    if workers is None:
        with pytest.raises(ValueError, match="needs 8 GPUs, and no machine of the cluster has them"):
            fleet._workers(ray, RayOptions(), mesh)
        return
    assert fleet._workers(ray, RayOptions(), mesh)[0] == workers


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
    told = b"a warning\nI1122 12:00:00 1 coordination_service_agent.cc:198] Coordination agent has successfully connected.\n"
    os.write(native, told + text.encode() + b"\n    @ 0x7f965b440634 (unknown)\n")
    os.close(native)
    line = hosts._end(hosts._listen(ours), hosts.stand("out.jsonl"))
    assert line.startswith(ENDS[text] + " ") and "\n" not in line
    assert capfdbinary.readouterr().err == told  # what comes before it is passed on
