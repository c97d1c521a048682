"""Who does what until when: processes that work on the parts, each part within its share of the minutes.

The time that is left is shared out anew before every part, so that the others have what one did not need. A process that takes
longer over a case than the part allows is killed, and the case is written off. One whose part is over is killed too, and what
it did stays.
"""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.chip import records

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 3.0
"""Seconds at the end, for the page."""
STARTING = 120.0
"""Seconds that a process may take to find the device."""
PROCESSES = 8
"""The most that share out a part on a GPU: each holds some of its memory."""


@dataclasses.dataclass
class Worker:
    """A process that works on parts.

    Attributes:
      process: running.
      said: what it wrote, line by line; None when it has ended.
      reader: the thread that takes it in.
      doing: cases that it compiles, or the one that it runs.
      heard: when it said something last.
      busy: whether it has not ended the part that it was asked for.
      ready: whether it has found the device.
    """

    process: Any
    said: Any
    reader: Any
    doing: list[str] = dataclasses.field(default_factory=list)
    heard: float = dataclasses.field(default_factory=time.monotonic)
    busy: bool = False
    ready: bool = False

    @classmethod
    def started(cls, command: Sequence[str], log: Any, environment: Mapping[str, str]) -> "Worker":
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        said: queue.Queue[Any] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, said), daemon=True)
        reader.start()
        return cls(process, said, reader)

    def ask(self, order: dict[str, Any]) -> None:
        self.busy, self.heard, self.doing = True, time.monotonic(), []
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def listen(self) -> bool:
        """Takes in what it said; whether it still runs.

        Raises:
          RuntimeError: where the folder has the records of another device.
        """
        while True:
            try:
                line = self.said.get_nowait()
            except queue.Empty:
                return True
            if line is None:
                return False
            self.heard, word = time.monotonic(), json.loads(line)
            if "ready" in word:
                self.ready = True
            elif "begun" in word and word["begun"] not in self.doing:
                self.doing.append(word["begun"])
            elif "over" in word or "compiled" in word:
                self.doing.remove(word.get("over", word.get("compiled")))
            elif "ended" in word:
                self.busy = False
            elif "refused" in word:
                raise RuntimeError(f"{word['refused']}: choose another folder")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.reader.join()


def _read(stream: Any, said: Any) -> None:
    with stream:
        for line in stream:
            if line.startswith("{"):
                said.put(line)
    said.put(None)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run over the parts.

    Attributes:
      folder: of the records.
      parts: in their order.
      until: of `time.monotonic`, when it has to be over.
      rehearse: see `parts.base.Setting`.
      changed: called now and then when there may be new records.
      environment: of the processes that work.
      worker: the command of such a process; a test has its own.
    """

    folder: Path
    parts: Sequence[Any]
    until: float
    rehearse: bool
    changed: Callable[[], None]
    environment: Mapping[str, str]
    worker: Sequence[str] = (sys.executable, "-m", "experiments.chip.worker")

    def go(self) -> None:
        """Works through the parts.

        Raises:
          RuntimeError: where no process finds a device, or not that of the folder's records.
        """
        records.close_line(self.folder)
        left = list(self.parts)
        with _team(self) as team:
            while left and time.monotonic() < self.until:
                part, share = left[0], left[0].share / sum(part.share for part in left)
                until = time.monotonic() + share * (self.until - time.monotonic())
                self._part(part, team, until)
                left = left[1:]

    def _part(self, part: Any, team: "Team", until: float) -> None:
        workers = team.of(part)
        for index, worker in enumerate(workers):
            worker.ask({"part": part.name, "index": index, "count": len(workers)})
        while any(worker.busy for worker in workers):
            for index, worker in enumerate(workers):
                runs = worker.listen()
                late = time.monotonic() - worker.heard > (part.longest if worker.ready else STARTING)
                if worker.busy and (not runs or late):
                    hopeless = self._write_off(part, worker, runs)
                    workers[index] = team.another(worker)
                    if not hopeless:
                        workers[index].ask({"part": part.name, "index": index, "count": len(workers)})
            self.changed()
            if time.monotonic() > until:
                team.dismiss(busy=True)
                break
            time.sleep(0.05)
        self.changed()

    def _write_off(self, part: Any, worker: Worker, runs: bool) -> bool:
        """The cases that a process was working on get an error for a result, so that nobody tries them again.

        Returns:
          Whether it was working on none, so that another process would come no further.
        """
        why = (
            f"no result within {part.longest:g} s" if runs else f"its process ended with status {worker.process.wait()}"
        )
        why += f", as {len(worker.doing)} cases were compiled at once" * (len(worker.doing) > 1)
        for case in worker.doing or ["all of its cases"]:
            records.append(self.folder, {"part": part.name, "case": case, "error": f"{why}, see log.txt"})
        return not worker.doing


class Team:
    """The processes of a run: one for what is timed, several for the rest."""

    def __init__(self, run: Run):
        self.run, self.workers, self.alone = run, [], None
        self.log = (run.folder / "log.txt").open("a")

    def of(self, part: Any) -> list[Worker]:
        """The processes for a part; those of another kind of part go."""
        if self.alone is not part.alone:
            self.dismiss()
        self.alone = part.alone
        while len(self.workers) < self._wanted(part):
            self.workers.append(self._start())
        return self.workers

    def another(self, worker: Worker) -> Worker:
        """A process in the place of one that is of no more use."""
        worker.kill()
        self.workers[self.workers.index(worker)] = fresh = self._start()
        return fresh

    def dismiss(self, busy: bool = False) -> None:
        """Ends the processes, or those that have not ended their part."""
        gone = [worker for worker in self.workers if worker.busy or not busy]
        self.workers = [worker for worker in self.workers if worker not in gone]
        for worker in gone:
            worker.kill()

    def _wanted(self, part: Any) -> int:
        about = records.about(records.read(self.run.folder))
        if part.alone or self.run.rehearse:
            return 1
        while about is None and not self.workers:  # the first says what the device is
            self.workers.append(self._start())
        while about is None:
            if not self.workers[0].listen() or time.monotonic() > self.run.until:
                raise RuntimeError(f"the first process did not find the device: see {self.run.folder / 'log.txt'}")
            time.sleep(0.1)
            about = records.about(records.read(self.run.folder))
        return min(PROCESSES, max(1, (os.cpu_count() or 1) // 2)) if about["platform"] == "gpu" else 1

    def _start(self) -> Worker:
        command = [*self.run.worker, str(self.run.folder.resolve()), *["rehearse"] * self.run.rehearse]
        environment = dict(self.run.environment)
        if not self.alone:  # nothing is timed: no process takes all memory, or tries products for the fastest
            flags = environment.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0"
            environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": " ".join(flags).strip()}
        return Worker.started(command, self.log, environment)


@contextlib.contextmanager
def _team(run: Run) -> Iterator[Team]:
    team = Team(run)
    try:
        yield team
    finally:
        team.dismiss()
        team.log.close()
