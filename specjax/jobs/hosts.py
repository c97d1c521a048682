"""A job that several processes do together. Each starts a member as a child process and reports its end in one line.

If its peers die, JAX aborts a member from native code with a page of text, or leaves it in a collective that never
returns. No handler inside the member can catch the abort, so the parent process watches it.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from specjax.jobs.options import HostOptions
from specjax.sharding import distributed
from specjax.terminal import bad_input, complain, flag, run_command

LOST = 3  # exit status: another process died
_NATIVE, _LIFE = "SPECJAX_NATIVE_FD", "SPECJAX_LIFE_FD"
_VERDICT_SECONDS = 15  # beyond the heartbeat: the time that JAX may take to say who died
_FATAL = re.compile(rb"^[WEF]\d.*coordination_service|JAX distributed service detected|Check failure stack trace")
_SILENT = re.compile(r"stopped sending heartbeats\):\s*\n(?:\S*task:)?(\d+)")


def asked(options: HostOptions, mesh: str | None) -> bool:
    """Whether several processes do the job.

    Raises:
      ValueError: on options that require other options.
    """
    several = options.distributed or options.coordinator is not None
    for name in ("num_processes", "process_id"):
        if getattr(options, name) is not None and not several:
            raise ValueError(f"{flag(name)} goes with --coordinator HOST:PORT, or with --distributed")
    if several and mesh is None:
        raise ValueError("a job of many processes needs --mesh, over the devices of all of them")
    return several


def together(options: HostOptions, stands: str, job: Callable[[bool], int]) -> int:
    """Does this process's part of a job; returns the exit status.

    Args:
      options: the processes.
      stands: how to resume the job after it lost a process; see `stand`.
      job: the job, called once the processes have joined with whether this is the first of them.
    """
    return _member(options, job) if _NATIVE in os.environ else _watch(options.words, stands)


def shared(options: HostOptions, own: Sequence[str]) -> dict[str, Any]:
    """The options that must be the same in all processes, by flag.

    Args:
      options: of the job.
      own: names of options that may differ.
    """
    apart = {*own, *(field.name for field in dataclasses.fields(HostOptions))}
    return {flag(name): value for name, value in vars(options).items() if name not in apart}


def check_same(named: dict[str, Any]) -> None:
    """Raises ValueError if one of these JSON values differs between processes."""
    for name, process in distributed.differing(named).items():
        raise ValueError(f"process {process} was given another {name} than process 0: give all processes the same")


def _watch(words: Sequence[str], stands: str) -> int:
    """Runs the member, shows its native code's output, and reports its end in one line."""
    ours, native = os.pipe()
    life, held = os.pipe()  # closed when this process ends, for any reason
    env = {**os.environ, _NATIVE: str(native), _LIFE: str(life)}
    command = [sys.executable, "-m", "specjax", *words]
    # a separate process group: Ctrl-C reaches it once, through this process
    member = subprocess.Popen(command, env=env, pass_fds=(native, life), process_group=0)
    os.close(native)
    os.close(life)
    relay = lambda number, frame: member.send_signal(number)
    before = {number: signal.signal(number, relay) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        about = _listen(ours)
        status = member.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(held)
    if status == LOST or (status < 0 and about):
        complain(_end(about, stands))
        return LOST
    if status < 0:
        complain(f"this process was ended by {signal.Signals(-status).name}; {stands}")
        return 128 - status
    return status


def _listen(file: int) -> str:
    """Passes on native code's output up to JAX's message that a process died; returns that message."""
    about: list[bytes] = []
    with os.fdopen(file, "rb") as lines:
        for line in lines:
            if about or _FATAL.search(line):
                about.append(line)
            else:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
    return b"".join(about).decode(errors="replace")


def _end(about: str, stands: str) -> str:
    """What happened, according to JAX's message."""
    if "RegisterTask" in about:
        return (
            "the processes did not find each other in time: start all of them, and let the coordinator's port through"
        )
    silent = _SILENT.search(about)
    other = (
        f"process {silent[1]}" if silent else "process 0, the coordinator," if "leader" in about else "another process"
    )
    return f"{other} ended or stopped answering, and its own messages may say why; {stands}"


def stand(output: str | None, where: str = "in all processes ") -> str:
    """A clause that says how to resume a job that lost a process or a worker.

    Args:
      output: its output file, if there is one.
      where: the place where the command is to be started.
    """
    if not output:
        return "start it again"
    return f"{output} keeps every record that was finished, and the same command {where}goes on from there"


def _member(options: HostOptions, job: Callable[[bool], int]) -> int:
    _own_streams(int(os.environ[_NATIVE]))
    threading.Thread(target=_die_with, args=(int(os.environ[_LIFE]),), daemon=True).start()
    try:
        status = run_command(lambda: _joined(options, job))
    except BaseException:
        traceback.print_exc()
        status = 1
    _leave(status)  # the remaining processes notice; a clean exit would wait for them


def _joined(options: HostOptions, job: Callable[[bool], int]) -> int:
    with bad_input():
        distributed.initialize(options.coordinator, options.num_processes, options.process_id)
        first = distributed.is_first()
        if not first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
    try:
        status = job(first)
        jax.distributed.shutdown()
        return status
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either
        if not distributed.says_lost(error):
            raise
        time.sleep(distributed.HEARTBEAT_SECONDS + _VERDICT_SECONDS)  # JAX says which process it was, and ends this one
        _leave(LOST)


def _own_streams(native: int) -> None:
    """Gives Python's streams separate descriptors.

    Native code's stderr goes to the watcher. Its stdout, where Gloo greets its peers, is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, name, place in ((1, "stdout", nowhere), (2, "stderr", native)):
        setattr(sys, name, os.fdopen(os.dup(number), "w", encoding="utf-8", buffering=1, errors="replace"))
        os.dup2(place, number)
        os.close(place)


def _die_with(life: int) -> None:
    os.read(life, 1)
    _leave(1)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)
