"""Commands in processes of their own: members of one job, each with two CPU devices or as many as are asked for."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax

from specjax import models
from specjax.models import LlamaLM, llama_config

ROOT = Path(__file__).parent.parent.parent
CONFIG = llama_config(24, 16, 24, 1, 2, 1, 8, max_position_embeddings=256)
LOOKUP = ("--drafter", "prompt_lookup:length=1")  # the default drafter's program holds the target's pass four times
PATIENCE = 60  # seconds, after which a process counts as hanging
PLUGIN = re.compile(r"^(WARNING: All log messages before absl::|I0000 [^\n]* cudart_stub)[^\n]*\n", re.MULTILINE)


def save(folder, diffusion=None):
    """A tiny model."""
    lm = LlamaLM(CONFIG)
    models.save(folder, lm, jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0))), diffusion=diffusion)
    return folder


def write_input(path, count, longest=200):
    """Greedy and sampled lines, some of them equal, with texts of several lengths and a line that is none."""
    lines = [
        {"prompt": [1 + i % 4] * (1 + i % 2), "temperature": float(i % 3 > 0), "max_new_tokens": longest // (1 + i % 3)}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]) + "{\n")
    return path


def environment(devices=2):
    """The tests' own, with so many CPU devices."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": path}


def start(*words, command="generate", devices=2):
    """A command of `specjax` with these options."""
    line = [sys.executable, "-m", "specjax", command, *map(str, words)]
    return subprocess.Popen(
        line, env=environment(devices), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end(process, patience=4 * PATIENCE):
    """Its exit status, stdout and stderr, without what JAX's CUDA plugin says where it is installed and there is no GPU."""
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hangs: {process.communicate()}") from None
    return process.returncode, out, PLUGIN.sub("", err)


@contextlib.contextmanager
def running(*words, **how):
    """`start`, and no process of it is left behind, whatever fails."""
    with start(*words, **how) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def pair(*words, own=((), ()), **how):
    """Two members of one job; `own` are options of each alone, `how` is of `start`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    who = ("--coordinator", address, "--num-processes", 2, "--process-id")
    with running(*words, *own[0], *who, 0, **how) as first, running(*words, *own[1], *who, 1, **how) as second:
        yield [first, second]


def wait_for_records(output, process):
    """Waits until the job wrote its first record."""
    until = time.monotonic() + 4 * PATIENCE
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None and time.monotonic() < until, end(process)
        time.sleep(0.02)
