"""A job over a Ray cluster (extra `ray`): Ray Data maps it over workers that hold an engine each, and retries what they lose.

The driver reads and writes the files. It loads no model: a task on the cluster makes requests of the lines.
"""

import argparse
import contextlib
import importlib
import logging
import math
import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from specjax.serve.engine import Timing
from specjax.serve.request import Record, Request
from specjax.serve.slots import Turn
from specjax.sharding.mesh import axis_sizes

_QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
_REACH_SECONDS = 10
_PART_SLOTS = 8  # requests of a part, in batches: more leave fewer slots empty at its end, fewer are lost with a worker


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a job over a Ray cluster."""
    add = parser.add_argument
    add("--ray", metavar="ADDRESS", help="map --input over a Ray cluster: its address, auto, or local for this machine")
    add("--ray-workers", type=int, metavar="N", help="engines there, each with its own --mesh (default: all that fit)")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError on options that do not go together."""
    if args.ray_workers is not None and (args.ray is None or args.ray_workers < 1):
        raise ValueError(f"--ray-workers is how many engines --ray starts, at least 1; got {args.ray_workers}")
    if args.ray is None:
        return
    if args.distributed or args.coordinator is not None:
        raise ValueError("--ray starts its own workers: give it or --distributed, not both")
    if not args.input or not (args.output or args.json):
        raise ValueError("--ray maps --input FILE.jsonl to --output FILE.jsonl (or to --json on stdout)")


class WorkerError(Exception):
    """What a worker could not go on with, in one line."""


class Fleet:
    """What a job asks of an engine, done by the workers of a cluster.

    Args:
      ray: the module.
      args: options of `specjax generate`.
      plan: what the cluster made of the input: facts about the model, and the keys and the capacity of all requests.

    Attributes:
      timing: its `decode_seconds` are wall time from the first part on, start of the workers and compilation included.
    """

    def __init__(self, ray: Any, args: argparse.Namespace, plan: SimpleNamespace):
        self.ray, self.args, self.plan = ray, args, plan
        self.timing = Timing()
        self.model = SimpleNamespace(tokenizer=None, masked=plan.masked)
        self.decoder = SimpleNamespace(drafter=SimpleNamespace(depth=plan.depth))

    def keys(self, requests: Sequence[Request]) -> np.ndarray:
        """See `Engine.keys`; of all requests of the input."""
        return self.plan.keys

    def capacity(self, requests: Sequence[Request]) -> int:
        """See `Engine.capacity`; of all requests of the input."""
        return self.plan.capacity

    def shared_prefix(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """See `Engine.shared_prefix`; of all requests of the input."""
        return self.plan.prefix

    def turns(self, requests: Sequence[Request], *, slots: int, keys: np.ndarray, **more: Any) -> Iterator[Turn]:
        """See `Engine.turns`; a turn is a part of the job that a worker ended.

        Raises:
          WorkerError: where a worker fails. One that dies is replaced, and its part done again.
        """
        if not requests:
            return
        workers, resources = _workers(self.ray, self.args)
        size = min(max(slots, math.ceil(len(requests) / (2 * workers))), _PART_SLOTS * slots)
        work = [pickle.dumps(one) for one in zip(range(len(requests)), requests, keys, strict=True)]
        parts = [work[at : at + size] for at in range(0, len(work), size)]
        data = self.ray.data.from_items([{"part": pickle.dumps(p)} for p in parts], override_num_blocks=len(parts))
        done = data.map_batches(
            Worker,
            fn_constructor_args=(self.args, slots, self.plan.capacity, self.plan.prefix),
            batch_size=1,
            compute=self.ray.data.ActorPoolStrategy(size=min(workers, len(parts)), max_tasks_in_flight_per_actor=1),
            **resources,
        )
        began, seen = time.perf_counter(), set()
        with _one_line(self.ray):
            for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
                for part in batch["records"]:
                    finished = [(at, record) for at, record in pickle.loads(part) if at not in seen]
                    seen.update(at for at, _ in finished)
                    tokens, steps = (sum(getattr(r, name) for _, r in finished) for name in ("new_tokens", "steps"))
                    self.timing.decode_seconds = time.perf_counter() - began
                    self.timing.new_tokens += tokens
                    self.timing.steps += steps
                    yield Turn(finished, tokens, steps, 0)


class Worker:
    """One engine, and the parts of the job that come to it: an actor of Ray Data.

    Args:
      args: options of `specjax generate`.
      slots: rows of the batch.
      capacity: of the whole job, so that every part runs the same programs.
      prefix: likewise.
    """

    def __init__(self, args: argparse.Namespace, slots: int, capacity: int, prefix: tuple[int, ...]):
        from specjax.jobs.generate import make_engine

        self.engine, self.args, self.slots = make_engine(args), args, slots
        self.capacity, self.prefix = capacity, prefix

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The records of parts, pickled as their requests were."""
        return {"records": np.array([self._complete(pickle.loads(part)) for part in batch["part"]], object)}

    def _complete(self, work: list[bytes]) -> bytes:
        at, requests, keys = zip(*map(pickle.loads, work), strict=True)
        turns = self.engine.turns(
            requests,
            slots=self.slots,
            stop=self.args.stop,
            ignore_eos=self.args.ignore_eos,
            capacity=self.capacity,
            keys=np.stack(keys),
            prefix=self.prefix,
        )
        return pickle.dumps([(at[i], record) for turn in turns for i, record in turn.finished])


@contextlib.contextmanager
def fleet(args: argparse.Namespace, lines: list[Any]) -> Iterator[tuple[Fleet, list[Request | Record], dict[str, Any]]]:
    """A fleet, what it is to complete, and the job's manifest.

    Args:
      args: options of `specjax generate`.
      lines: of the input.

    Raises:
      ValueError: one line: Ray is not installed, its cluster is not there, or the job cannot be done.
    """
    ray = _connect(args.ray)
    try:
        _, resources = _workers(ray, args)
        with _one_line(ray, ValueError):
            # its process ends with it: one that stayed would keep its devices from the workers
            plan = ray.get(ray.remote(max_calls=1, **resources)(_plan).remote(args, lines))
        yield Fleet(ray, args, plan), plan.items, plan.manifest
    finally:
        ray.shutdown()


def _plan(args: argparse.Namespace, lines: list[Any]) -> SimpleNamespace:
    """On the cluster: everything about the job that needs the model."""
    from specjax.jobs.generate import make_engine, make_items, make_manifest

    engine = make_engine(args)
    items = make_items(args, engine, lines)
    requests = [item for item in items if isinstance(item, Request)]
    return SimpleNamespace(
        items=items,
        manifest=make_manifest(args, engine, lines),
        keys=engine.keys(requests),
        capacity=engine.capacity(requests),
        prefix=engine.shared_prefix(requests) if args.shared_prefix else (),
        masked=engine.model.masked,
        depth=0 if engine.model.masked else engine.decoder.drafter.depth,
    )


def _connect(address: str) -> Any:
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ValueError("--ray needs Ray on every machine: pip install 'specjax[ray]'") from error
    place, _, port = address.removeprefix("ray://").rpartition(":")
    if place and port.isdigit():  # Ray itself would try for minutes
        try:
            socket.create_connection((place, int(port)), _REACH_SECONDS).close()
        except OSError as error:
            raise ValueError(f"there is no Ray cluster at {address!r}: {error.strerror or error}") from error
    ray._private.worker._worker_logs_enabled = False  # Ray's own messages would go to stdout, among the records
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        own = {"include_dashboard": False} if address == "local" else {}
        with _native_silence():
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"there is no Ray cluster at {address!r}: {_last_line(error)}") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def _workers(ray: Any, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """How many workers, and what Ray reserves for each, on one machine: the devices of its mesh, or the machine's CPUs."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    devices = math.prod(axis_sizes(args.mesh).values()) if args.mesh else 1
    kind = next((kind for kind in ("TPU", "GPU") if any(has.get(kind) for has in machines)), None)
    if kind is None:  # JAX uses all cores of a machine, however many devices it makes of them
        return args.ray_workers or len(machines), {"num_cpus": 1}
    fit = sum(int(has.get(kind, 0) // devices) for has in machines)
    if not fit:  # Ray would wait for such a machine
        raise ValueError(
            f"a worker with --mesh {args.mesh} needs {devices} {kind}s, and no machine of the cluster has them"
        )
    return args.ray_workers or fit, {"num_gpus": devices} if kind == "GPU" else {"resources": {kind: devices}}


@contextlib.contextmanager
def _native_silence() -> Iterator[None]:
    """Without what native code says on stderr: Ray's greets there where it is told to be quiet."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def _one_line(ray: Any, kind: type[Exception] = WorkerError) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        raise kind(str(cause) if isinstance(cause, ValueError) else f"a worker failed: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).split("\n")[-1].strip()
