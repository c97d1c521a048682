"""A job on a Ray cluster (extra `ray`): Ray Data maps it over workers with one engine each, and retries lost parts.

The driver reads and writes the files. It loads no model: a task on the cluster turns the lines into requests.
"""

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specjax.jobs.completer import Shapes, Whole, decoding_of, turns_of
from specjax.jobs.options import JobOptions, RayOptions
from specjax.jobs.output import Item
from specjax.jobs.work import make_engine, make_items, make_manifest
from specjax.serve.engine import Timing
from specjax.serve.slots import Turn
from specjax.serve.watch import OnText
from specjax.sharding.mesh import axis_sizes

_QUIET = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
_REACH_SECONDS = 10
_PART_SLOTS = 8  # requests of a part, in batches: more leave fewer empty slots, fewer lose less with a worker


def check(options: JobOptions) -> None:
    """Raises ValueError on incompatible options."""
    workers = options.ray_workers
    if workers is not None and (options.ray is None or workers < 1):
        raise ValueError(f"--ray-workers is how many engines --ray starts, at least 1; got {workers}")
    if options.ray is None:
        return
    if options.select is not None:
        raise ValueError("--select chooses among completions of one process: leave --select or --ray out")
    if options.distributed or options.coordinator is not None:
        raise ValueError("--ray starts its own workers: give it or --distributed, not both")
    if not options.input or not (options.output or options.json):
        raise ValueError("--ray maps --input FILE.jsonl to --output FILE.jsonl (or to --json on stdout)")


class WorkerError(Exception):
    """A worker's failure, in one line."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job's input as the cluster prepared it, since the driver loads no model.

    Attributes:
      items: the items for which the job writes records.
      manifest: the job's manifest.
      whole: its requests.
      decoding: see `Completer`.
      left_out: see `Engine.left_out`.
    """

    items: Sequence[Item]
    manifest: dict[str, Any]
    whole: Whole
    decoding: str
    left_out: str | None


class Fleet:
    """A `specjax.jobs.completer.Completer` over the workers of a cluster.

    Args:
      ray: the module.
      options: of the job.
      plan: from the cluster.

    Attributes:
      timing: its `decode_seconds` are wall time from the first part on, including the start of the workers and
        compilation.
      tokenizer: None, since the driver has none.
      decoding: see `Completer`.
      prefix: see `Completer`.
      left_out: see `Engine.left_out`.
    """

    tokenizer = None

    def __init__(self, ray: Any, options: JobOptions, plan: Plan):
        self.ray, self.options, self.whole = ray, options, plan.whole
        self.timing = Timing()
        self.decoding, self.prefix, self.left_out = plan.decoding, plan.whole.shapes.prefix, plan.left_out

    def turns(self, left: Sequence[int], on_text: OnText | None) -> Iterator[Turn]:
        """See `Completer.turns`; a turn is a part of the job that a worker finished.

        Raises:
          WorkerError: if a worker fails. A worker that dies is replaced, and its part is repeated.
        """
        if not left:
            return
        shapes = self.whole.shapes
        workers, resources = _workers(self.ray, self.options, self.options.mesh)
        size = min(max(shapes.slots, math.ceil(len(left) / (2 * workers))), _PART_SLOTS * shapes.slots)
        work = [pickle.dumps(one) for one in zip(left, *self.whole.part(left), strict=True)]
        parts = [work[at : at + size] for at in range(0, len(work), size)]
        data = self.ray.data.from_items([{"part": pickle.dumps(p)} for p in parts], override_num_blocks=len(parts))
        done = data.map_batches(
            Worker,
            fn_constructor_args=(self.options, shapes),
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
    """An actor of Ray Data with one engine, which processes parts of the job.

    Args:
      options: of the job.
      shapes: the shapes of the whole job, so that every part runs the same programs.
    """

    def __init__(self, options: JobOptions, shapes: Shapes):
        self.engine, self.options, self.shapes = make_engine(options, shapes.slots), options, shapes

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The records of parts, pickled as their requests were."""
        return {"records": np.array([self._complete(pickle.loads(part)) for part in batch["part"]], object)}

    def _complete(self, work: list[bytes]) -> bytes:
        at, requests, keys = zip(*map(pickle.loads, work), strict=True)
        turns = turns_of(self.engine, self.options, self.shapes, requests, np.stack(keys))
        return pickle.dumps([(at[i], record) for turn in turns for i, record in turn.finished])


@contextlib.contextmanager
def fleet(options: JobOptions, lines: Sequence[Any]) -> Iterator[tuple[Fleet, Sequence[Item], dict[str, Any]]]:
    """A fleet, the items to complete, and the job's manifest.

    Args:
      options: of the job.
      lines: of the input.

    Raises:
      ValueError: one line, if Ray is not installed, its cluster cannot be reached, or the job cannot be done.
    """
    ray = _connect(options.ray or "local")
    try:
        _, resources = _workers(ray, options, options.mesh)
        with _one_line(ray, ValueError):
            # its process ends with it; otherwise it would keep its devices from the workers
            plan = ray.get(ray.remote(max_calls=1, **resources)(_plan).remote(options, lines))
        yield Fleet(ray, options, plan), plan.items, plan.manifest
    finally:
        ray.shutdown()


def _plan(options: JobOptions, lines: Sequence[Any]) -> Plan:
    """Prepares everything about the job that needs the model; runs on the cluster."""
    engine = make_engine(options, len(lines))
    items = make_items(options, engine, lines)
    manifest, whole = make_manifest(options, engine, lines), Whole.of(options, engine, items)
    return Plan(items, manifest, whole, decoding_of(engine), engine.left_out(options.of_prompts.given, items))


def _connect(address: str) -> Any:
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ValueError("--ray needs Ray on every machine: pip install 'specjax[ray]'") from error
    place, _, port = address.removeprefix("ray://").rpartition(":")
    if place and port.isdigit():  # Ray itself would retry for minutes
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


def _workers(ray: Any, options: RayOptions, mesh: str | None) -> tuple[int, dict[str, Any]]:
    """The number of workers, and Ray's reservation for each on one machine: its mesh's devices, or the machine's
    CPUs."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    devices = math.prod(axis_sizes(mesh).values()) if mesh else 1
    kind = next((kind for kind in ("TPU", "GPU") if any(has.get(kind) for has in machines)), None)
    if kind is None:  # JAX uses all cores of a machine, whatever the number of its CPU devices
        return options.ray_workers or len(machines), {"num_cpus": 1}
    fit = sum(int(has.get(kind, 0) // devices) for has in machines)
    if not fit:  # Ray would wait for such a machine
        raise ValueError(f"a worker with --mesh {mesh} needs {devices} {kind}s, and no machine of the cluster has them")
    return options.ray_workers or fit, {"num_gpus": devices} if kind == "GPU" else {"resources": {kind: devices}}


@contextlib.contextmanager
def _native_silence() -> Iterator[None]:
    """Hides native code's stderr, where Ray prints a greeting even if told to be quiet."""
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
