"""How the pages' blocks are run: in a folder that has what they read, with small things in the place of large ones."""

import contextlib
import dataclasses
import fnmatch
import io
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.blocks import FIRST, ROOT, SECOND, Block, named

from specjax import cli, models
from specjax.models import LlamaLM, llama_config

SUBSTITUTES = (
    # a reader's own, and what is not here
    ("README-*", "pip install -e . && ", ""),
    ("index-*", "pip install -e . && ", ""),
    ("hosts-6", "pip install 'specjax[ray]'\n", ""),
    ("drafters-*", "meta-llama/Llama-3.1-8B-Instruct", "tiny"),
    ("drafters-*", "FOLDER_OR_HUB_ID", "tiny-eagle3"),
    ("drafters-*", "HEAD FOLDER", "tiny-eagle3 OTHER"),
    ("drafters-*", "--target MODEL", "--target tiny"),
    ("drafters-*", "MODEL HEAD", "tiny tiny-eagle3"),
    ("diffusion-*", "GSAI-ML/LLaDA-8B-Instruct", "tiny-diffusion"),
    ("diffusion-1", "FOLDER", "tiny-diffusion"),
    ("bench-*", "FOLDER", "tiny-diffusion"),
    ("evaluate-*", "MASKED", "tiny-diffusion --families lists"),
    ("evaluate-*", "FOLDER", "tiny"),
    ("machines-5", "MODEL", "tiny"),
    ("models-*", "FOLDER", "tiny"),
    ("memory-*", "FOLDER", "tiny"),
    ("verifiers-*", "STUDENT", "tiny-draft"),
    ("verifiers-*", "TEACHER", "tiny"),
    ("which-*", "MODEL", "tiny"),
    ("meshes-5", "model=4", "model=8"),
    ("models-*", "model=1", "model=8"),
    ("folders-*", "model=1", "model=8"),
    ("folders-*", "/tmp/", ""),
    ("train-7", "answers.jsonl", "written.jsonl"),
    ("train-*", "specjax/draft", "src"),
    ("train-*", "prompt=32 ...", "prompt=32 --draft tiny-draft --data src --output one"),
    ("train-*", "temperature=0.7 ...", "temperature=0.7 --draft tiny-draft --data src --output two"),
    ("train-*", "--reference my-draft ...", "--reference my-draft --draft tiny-draft --data src --output three"),
    # what would take minutes
    ("bench-*", "specjax bench   ", "specjax bench --drafter draft"),
    ("bench-*", "bench --tasks", "bench --drafter draft --tasks"),
    ("bench-*", "bench spec", "bench spec --drafter draft"),
    ("bench-*", "--compare", "--compare --drafter none"),
    ("use-*", "specjax bench", "specjax bench --drafter draft"),
    ("*", "--drafter all", "--drafter draft,medusa"),
    ("*", "--decode all", "--decode fixed:cache=none,threshold:cache=prefix"),
    ("diffusion-*", "bench parallel", "bench parallel --samples 1 --tasks copy:n=2"),
    ("diffusion-*", "json,code,edit,lists,translate,fill", "lists"),
    ("evaluate-*", "math,edit,lists --limit 50", "lists --limit 2"),
    ("bench-*", "--decode plain:cache=ems,plain:cache=gear", "--decode plain:cache=ems"),
    ("bench-*", "--batch-size 8", "--batch-size 1"),
    ("use-*", "specjax eval", "specjax eval --families lists"),
    ("meshes-*", "length=15", "length=1"),
    ("meshes-*", "specjax eval", "specjax eval --families lists"),
    ("plan-*", "70B", "8B"),
    ("plan-*", "length=15", "length=1"),
    ("plan-*", "1,8,24", "1"),
    ("verifiers-*", "length=16", "length=3"),
    ("train-*", "5 25", "1"),
    ("which-*", "--hidden 768 --layers 12 --heads 12", "--hidden 48 --layers 2 --heads 2"),
)
"""In which blocks (a page's, mostly), what, and what stands there instead."""

SHORT = {
    "bench parallel": "--max-new-tokens 32",
    "bench": "--prompts 1 --repeats 1 --max-new-tokens 8",
    "capture": "--length 64",
    "check-head": "--max-new-tokens 8",
    "eval": "--limit 1 --max-new-tokens 16",
    "train hmm": "--states 2 --rounds 2 --length 64 --max-new-tokens 8",
    "train evopress": "--generations 1 --offspring 2 --survivors 1 --tokens 64 --initial 2 --initial-tokens 32",
    "train": "--steps 2 --batch-size 2 --length 64",
}
"""What a command is told besides, so that it takes seconds: of an option that is there twice, the last one counts."""

AFTER = {
    "retrieval-2": "retrieval-1",
    "retrieval-3": "retrieval-1",
    "retrieval-4": "retrieval-1",
    "train-16": "train-1",
    "constraints-7": "constraints-6",
    "constraints-8": "constraints-7",
}
"""Blocks that need what another one of their page leaves."""


def _xlnet(folder: Path) -> None:
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24)
        transformers.XLNetLMHeadModel(config).save_pretrained(folder)


def _adapter(folder: Path) -> None:
    """Of one matrix of `tiny`, as PEFT writes it."""
    shape = models.load("tiny").params["layers"][0]["attention"]["q"]["kernel"].shape
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    matrices = {f"{name}A.weight": np.ones((2, shape[0])), f"{name}B.weight": np.zeros((shape[1], 2))}
    save_file({key: value.astype(np.float32) for key, value in matrices.items()}, folder / "adapter_model.safetensors")


MADE = {"diffusion-5": ("FOLDER", _xlnet), "models-3": ("ADAPTER", _adapter)}
"""Folders that a block reads, and who makes them."""

GIVEN: dict[str, dict[str, Any]] = {
    "kernels-1": {"LlamaLM": LlamaLM, "config": llama_config(64, 32, 64, 2, 2, 2, 16)},
    "machines-4": {"MODEL": "tiny", "prompts": ["[ red, cup,", "[ hen, dog,"]},
}
"""Names that a block takes as known."""

ADDRESS = "127.0.0.1:8476"
"""Of the pages' two processes; a test takes a port that is free."""
PATIENCE = 600
"""Seconds that a shell may take."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a block has left: a folder, the names of its Python, and what it wrote to stdout."""

    folder: Path
    names: dict[str, Any]
    out: str


class Reader:
    """Runs blocks, each once, in a folder of its own or in that of the block that it needs; see `AFTER`.

    Args:
      new_folder: makes one.
    """

    def __init__(self, new_folder: Callable[[], Path]):
        self.new_folder = new_folder
        self.ran: dict[str, Ran] = {}

    def run(self, block: Block) -> Ran:
        """Runs a block after the one that it needs."""
        if block.name not in self.ran:
            folder = self.run(named(AFTER[block.name])).folder if block.name in AFTER else furnished(self.new_folder())
            if block.name in MADE:
                own, make = MADE[block.name]
                make(folder / own)
            names = dict(GIVEN.get(block.name, {}))
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
                run(block, names)
            self.ran[block.name] = Ran(folder, names, out.getvalue())
        return self.ran[block.name]


def run(block: Block, names: dict[str, Any]) -> None:
    """Runs a block in the present folder; what its Python names is added to `names`."""
    text = replaced(block, block.text)
    if "sys.argv" in text:  # a program that two processes run
        Path("program.py").write_text(text)
        shells(*(f"JAX_NUM_CPU_DEVICES=2 python program.py {process}" for process in (0, 1)))
    elif block.kind == "python":
        exec(compile(text, block.name, "exec"), names)
    elif FIRST in text:
        shells(text, replaced(block, block.beside or block.text.replace(FIRST, SECOND)))
    elif "--ray" in text or (found := commands(text)) is None:  # Ray warns, and leaves things in its process
        shells(text)
    else:
        for words in found:
            status = cli.main([*words, *shlex.split(SHORT.get(" ".join(words[:2]), SHORT.get(words[0], "")))])
            assert status == 0, f"specjax {shlex.join(words)} ends with {status}"


def replaced(block: Block, text: str) -> str:
    """The text with small things in the place of large ones."""
    for names, old, new in SUBSTITUTES:
        if fnmatch.fnmatchcase(block.name, names):
            text = text.replace(old, new)
    return text


def commands(text: str) -> list[list[str]] | None:
    """The words of each command, where all of them are of `specjax` and nothing in them is a shell's work."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        split = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
        split.whitespace_split = True
        words = list(split)
        if any(set(word) <= set("&|<>()") or set(word) & set("*$") for word in words):
            return None
        for end, own in itertools.groupby(words, ";".__eq__):
            first, *more = own
            if not end and first != "specjax":
                return None
            found += [] if end else [more]
    return found


def shells(*texts: str) -> None:
    """Runs texts beside each other, each in a shell that ends at the first command that fails."""
    env = dict(os.environ, PATH=f"{Path('bin').absolute()}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    env["PYTHONPATH"] = str(ROOT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = lambda text: "set -euo pipefail\n" + text.replace(ADDRESS, address)
    with contextlib.ExitStack() as started:
        run = lambda text: subprocess.Popen(
            ["bash", "-c", script(text)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        all_of_them = [started.enter_context(run(text)) for text in texts]
        try:
            said = [process.communicate(timeout=PATIENCE) for process in all_of_them]
        finally:
            for process in all_of_them:
                process.kill()
    for process, (out, err) in zip(all_of_them, said, strict=True):
        print(out, end="")
        assert process.returncode == 0, err


def furnished(folder: Path) -> Path:
    """The folder with what the pages' commands read, and a command `specjax` of this checkout, with the words of `SHORT`."""
    lines = lambda name, *objects: (folder / name).write_text("".join(json.dumps(o) + "\n" for o in objects))
    (folder / "src").mkdir()
    for name in ("tree.py", "about.py"):
        (folder / "src" / name).write_text((ROOT / "specjax" / name).read_text())
    (folder / "docs").mkdir()
    (folder / "docs" / "page.md").write_text("# A page\n\nThe list is [ hen, dog, deer, olive, mouse, mango ].\n" * 20)
    asked = [f"Repeat the list. [ hen, {word}, olive ]" for word in ("dog", "deer", "owl", "mouse")]
    lines("prompts.jsonl", *({"messages": [{"role": "user", "content": text}], "max_new_tokens": 16} for text in asked))
    for name, times in (("answers.jsonl", 8), ("other.jsonl", 9)):
        lines(name, *({"prompt": text, "completion": text[17:] * times} for text in asked * 2))
    lines("texts.jsonl", *({"text": text} for text in asked * 8))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "shape.json").write_text(json.dumps(sizes | {"num_hidden_layers": 1}))
    lines("pairs.jsonl", *({"prompt": text, "continuation": text[17:]} for text in asked))
    lines("own.jsonl", {"prompt": "[ hen, dog, hen,", "answers": [" dog"], "max_new_tokens": 4})
    lines("question.jsonl", {"question_id": 81, "category": "writing", "turns": ["def add(a, b):", "def sub(a, b):"]})
    (folder / "data" / "Github_easy").mkdir(parents=True)
    (folder / "data" / "Github_easy" / "flag.json").write_text('{"type": "boolean"}')
    (folder / "bin").mkdir()
    cases = "".join(f'"{name} "*) set -- "$@" {more};;\n' for name, more in SHORT.items())
    command = folder / "bin" / "specjax"
    command.write_text(
        f'#!/bin/sh\ncase "$1 $2 " in\n{cases}esac\nexec {shlex.quote(sys.executable)} -P -m specjax "$@"\n'
    )
    command.chmod(0o755)
    return folder
