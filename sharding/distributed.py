"""One program over several processes: how they find each other, and how they agree.

Every process runs the same program on its own part of the devices. So every decision of the host must be the same in
all processes: it is made from arrays that all of them hold (`to_host`), or exchanged (`anywhere`, `from_first`).
"""

import functools
import hashlib
import itertools
import json
import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEARTBEAT_SECONDS = 20  # the time after which a silent process counts as dead
START_SECONDS = 120  # the time for all processes to start, and to stop
_LOST = re.compile("Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins this process to the others (`jax.distributed.initialize`). Call it before anything else of JAX.

    CPUs communicate over Gloo. Arguments that are None come from `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, otherwise from the cluster, if JAX knows it: Cloud TPU, GKE, Slurm, Open MPI.

    A dead process is noticed after `HEARTBEAT_SECONDS`, and JAX then aborts the others. JAX also aborts if not all
    processes are present after `START_SECONDS`.

    Args:
      coordinator: `host:port` at which the others can reach process 0; the port must be free there.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.

    Raises:
      ValueError: one line that says what is missing or wrong, or why the process cannot join.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _integer(num_processes, "JAX_NUM_PROCESSES")
    process_id = _integer(process_id, "JAX_PROCESS_ID")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"the coordinator is HOST:PORT, such as 10.0.0.1:8476, not {coordinator!r}")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(
            f"process ids go from 0 to {num_processes - 1} for {num_processes} processes, not {process_id}"
        )
    complete = None not in (coordinator, num_processes, process_id)
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending the process
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if complete else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=START_SECONDS,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"this is not a cluster that JAX knows ({error}): give the coordinator HOST:PORT, the number of processes and the "
            "id of this one"
        ) from error
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"process {process_id} of {num_processes} cannot join the others at {coordinator}: {first}"
        ) from error
    own, devices, processes = jax.local_device_count(), jax.device_count(), jax.process_count()
    if devices != own * processes:  # `gather` needs equally many from each
        raise ValueError(
            f"this process has {own} devices of {devices}, and there are {processes} processes: give all of them as many"
        )


def _integer(value: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    if value is not None or text is None:
        return value
    if not text.isdigit():
        raise ValueError(f"{name} is {text!r}, which is not a number")
    return int(text)


def is_first() -> bool:
    """Whether this process acts for all: it writes files and prints. True if there is only one process."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def says_lost(error: Exception) -> bool:
    """Whether an error comes from the end of another process, judging by JAX's message."""
    return not _alone() and bool(_LOST.search(str(error)))


def _alone() -> bool:
    return not jax.distributed.is_initialized() or jax.process_count() == 1


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def to_host(tree: Any) -> Any:
    """Arrays as numpy arrays, whole and the same in every process; `jax.device_get` if there is only one process.

    Args:
      tree: a pytree of arrays on one mesh; it should be small, since every device gets a copy.
    """
    if _alone():
        return jax.device_get(tree)
    leaves, form = jax.tree.flatten(tree)
    apart = lambda x: isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    parts = [i for i, leaf in enumerate(leaves) if apart(leaf)]
    if parts:
        whole = _replicate(leaves[parts[0]].sharding.mesh)([leaves[i] for i in parts])
        for i, leaf in zip(parts, whole, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(form, [np.asarray(leaf) for leaf in leaves])


def to_devices(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A numpy array, the same in every process, as an array over the devices of all of them."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def to_places(tree: Any, places: Any) -> Any:
    """Arrays moved to other shardings (`jax.device_put`).

    Arrays that are only on this process's devices must be the same in every process.

    Args:
      tree: a pytree of arrays.
      places: a sharding for each array.
    """
    if _alone():
        return jax.device_put(tree, places)
    own = lambda x: isinstance(x, jax.Array) and not x.is_fully_addressable
    return jax.tree.map(lambda x, at: jax.device_put(x, at) if own(x) else to_devices(np.asarray(x), at), tree, places)


def gather(value: np.ndarray) -> np.ndarray:
    """The values of all processes, `[processes, ...]`. All must call it, with the same shape and a type of at most 32
    bits."""
    return np.asarray(multihost_utils.process_allgather(value)).reshape(jax.process_count(), *np.shape(value))


def anywhere(flag: bool) -> bool:
    """Whether the flag is set in any process; all must call it."""
    return flag if _alone() else bool(gather(np.asarray(flag)).any())


def largest(number: int) -> int:
    """The largest number of all processes, of 32 bits; all must call it."""
    return number if _alone() else int(gather(np.asarray(number, np.int32)).max())


def from_first(value: np.ndarray) -> np.ndarray:
    """The value of process 0; all must call it, with the same shape and type."""
    return value if _alone() else gather(value)[0]


def meet(mesh: Mesh) -> None:
    """Connects the processes for every group of mesh axes; all must call it at about the same time.

    On CPUs, Gloo connects processes at a group's first use and waits 30 seconds. Processes may differ by more than that
    in compiling a first program.
    """
    axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    one = to_devices(np.ones((), np.float32), NamedSharding(mesh, PartitionSpec()))
    for count in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, count):
            total = functools.partial(jax.lax.psum, axis_name=group)
            ask = jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
            jax.block_until_ready(jax.jit(ask)(one))


def differing(named: dict[str, Any]) -> dict[str, int]:
    """The JSON values that differ between processes: by name, the first process that differs from process 0.

    Args:
      named: values by name; names are the same in every process.
    """
    digest = lambda value: np.frombuffer(hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest(), np.uint8)
    said = gather(np.stack([digest(value) for value in named.values()]))
    wrong = (said != said[:1]).any(axis=2)
    return {name: int(wrong[:, i].argmax()) for i, name in enumerate(named) if wrong[:, i].any()}
