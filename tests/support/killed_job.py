"""Runs one job again and again, each time killed (SIGKILL) at a random moment after it wrote something, then to its end, then
as another job without a kill. Every run is a fork of this process, which has imported everything and started no device.

A line of JSON a run on stdout: complete lines before it, requests that the engine was asked for, exit status.
"""

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path

from specjax import cli
from specjax.serve.engine import Engine


def child(folder, words, asked):
    turns = Engine.turns

    def counted(self, requests, **options):
        asked.write_text(str(len(requests)))
        return turns(self, requests, **options)

    Engine.turns = counted
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os._exit(cli.main(words))


def go(folder, name, words, more=None):
    """One run; `more` bytes are written before it is killed, None lets it end."""
    output, asked = folder / name, folder / "asked"
    content = output.read_bytes() if output.exists() else b""
    asked.unlink(missing_ok=True)
    words = ["generate", "--input", str(folder / "in.jsonl"), "--output", str(output), *words]
    pid = os.fork()
    if not pid:
        child(folder, words, asked)
    ended = status = 0
    while more is not None and not ended:
        if output.exists() and output.stat().st_size >= len(content) + more:
            time.sleep(random.uniform(0, 0.005))
            os.kill(pid, 9)
            break
        time.sleep(0.0002)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        status = os.waitpid(pid, 0)[1]
    number = int(asked.read_text()) if asked.exists() else -1
    status = os.waitstatus_to_exitcode(status)
    print(json.dumps({"before": content.count(b"\n"), "asked": number, "status": status}), flush=True)
    assert output.read_bytes().startswith(content[: content.rfind(b"\n") + 1])


def main(folder, kills, words):
    importlib.import_module("specjax.jobs.generate")  # once, and not in every fork
    random.seed(0)
    count = len((folder / "in.jsonl").read_text().splitlines())
    for _ in range(kills):
        size = 150  # bytes of a short record
        go(folder, "out.jsonl", words, random.randint(1, max(1, size * count // (2 * kills))))
    go(folder, "out.jsonl", words)
    go(folder, "whole.jsonl", words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
