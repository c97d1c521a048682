"""What a job and the decoding of text take, by their lines and tokens."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from specjax import models
from specjax.models import LlamaLM, llama_config
from specjax.serve.request import Request
from specjax.serve.text import Stops, Written

VOCABULARY, PROMPT = 512, 64


def job(count: int) -> dict[str, float]:
    """A job of so many lines, each of which is there twice and gets one token."""
    with tempfile.TemporaryDirectory() as scratch:
        return generate(prepared(Path(scratch), count))


def resumed(count: int) -> dict[str, float]:
    """The same command once more, when all records are there but the last one."""
    with tempfile.TemporaryDirectory() as scratch:
        words = prepared(Path(scratch), count)
        generate(words)
        output = Path(scratch) / "out.jsonl"
        lines = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(b"".join(lines[:-1]))
        return generate(words)


def prepared(folder: Path, count: int) -> list[str]:
    """Words of a command over a small model and a file of so many lines."""
    lm = LlamaLM(llama_config(VOCABULARY, 64, 128, 2, 4, 4, 16, max_position_embeddings=2 * PROMPT))
    models.save(folder / "model", lm, lm.init(jax.random.key(0)))
    with (folder / "in.jsonl").open("w") as lines:
        for i in range(count):
            prompt = [(i // 2 * 7 + j * j) % VOCABULARY for j in range(PROMPT)]
            lines.write(json.dumps({"prompt": prompt, "max_new_tokens": 1}) + "\n")
    given = {"model": "model", "input": "in.jsonl", "output": "out.jsonl"}
    words = [word for name, own in given.items() for word in (f"--{name}", str(folder / own))]
    return [*words, "--drafter", "none", "--batch-size", "64"]


def generate(words: list[str]) -> dict[str, float]:
    """Processor seconds, wall seconds and peak bytes of `specjax generate`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "experiments.growth.child", "generate", *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"the job ended with {found.returncode}: {found.stderr}")
    return {**json.loads(found.stdout.splitlines()[-1]), "wall": time.perf_counter() - began}


def text(count: int) -> dict[str, float]:
    """Tokens as text, eight at a time, with stop strings that never come: as a job with `--stop` reads them."""
    tokenizer: Any = models.load("tiny").tokenizer
    ids = tokenizer.encode("Say the answer in words: pear, apple, fig and 17 more. ")
    tokens = (ids * (count // len(ids) + 1))[:count]
    request = Request("", tuple(ids))
    began = time.process_time()
    written, stops = Written(tokenizer, request), Stops(tokenizer, request, ("no such text",))
    for at in range(0, count, 8):
        written.add(tokens[at : at + 8])
        assert stops.add(tokens[at : at + 8]) is None
    return {"seconds": time.process_time() - began}
