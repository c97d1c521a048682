"""Every way to decode that needs no training, with a model that others published: `python -m experiments.first_contact`.

A handful of prompts is answered by SmolLM2-135M-Instruct in every way of `cases.py`, twice, and texts are compared with plain
decoding's. What is measured stands in `results.json`, a row a way, and the tables in `README.md`; a second run goes on with the
ways that are missing.

python -m experiments.first_contact              # all
python -m experiments.first_contact --only beam  # those whose group or line holds this, anew
python -m experiments.first_contact --show       # the tables of the results that are there

Seconds are those of the processor, of all threads: other work on the machine counts little. Nothing that was compiled is kept.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import jax
import numpy as np

import specjax
from experiments.claims import MARKED, by_line, table
from experiments.first_contact.cases import GREEDY, SAME, WARPED, Case, cases
from specjax import Sampling, models
from specjax.draft.pard2.features import Joined
from specjax.draft.pard2.folder import joined_fields, write_projection
from specjax.models import few_bits
from specjax.models.model import Model

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
MODEL = "smollm2"
PROMPTS = (
    "What is the capital of France?",
    "Rewrite this in the past tense: The cat sits on the mat and the dog sleeps by the door.",
    "List five fruits, one a line.",
)
MASK = 16
"""A token of the model that stands for masks."""
LONGEST = 24
"""New tokens of a text, at most."""
USUAL = ({}, {"temperature": 0.8})


class Bench:
    """The models that cases ask for, one at a time, and what they are decoded beside."""

    def __init__(self, scratch: Path):
        self.asked: dict[str, Any] | None = None
        self.model: Any = None
        self.scratch = scratch
        self.draft = scratch / "draft"
        self.datastore = scratch / "datastore"
        self.hmm = scratch / "hmm"
        target = self.target({})
        quantised = models.load(target, weights="int4:group=32").params
        plain = jax.tree.map(few_bits.plain, quantised, is_leaf=few_bits.is_quantised)
        width, joined = target.lm.config.hidden_size, Joined().of(target.lm.num_layers)
        size = len(joined.target_layers) * width
        # a mask and a projection that were not trained: the drafts of pard and pard2 are poor, and their texts must be right
        models.save(self.draft, target.lm, plain, tokenizer=target.tokenizer, fields=joined_fields(MASK, joined, size))
        drawn = np.random.default_rng(0).normal(size=(size, width))
        write_projection(self.draft, {"kernel": drawn / size**0.5}, "float32")
        documents = str(HERE.parents[1] / "docs")
        command("datastore", "build", documents, "--model", MODEL, "--output", str(self.datastore))
        text = str(HERE.parents[1] / "specjax/tasks")
        few = ("--states", "8", "--rounds", "3", "--length", "64")
        command("train", "hmm", "--target", MODEL, "--data", text, *few, "--output", str(self.hmm))

    def target(self, load: dict[str, Any]) -> Model:
        if load != self.asked:
            self.model = None
            gc.collect()
            self.asked, self.model = load, specjax.load(MODEL, **load)
        return self.model

    def engine(self, case: Case) -> specjax.Engine:
        """Raises ValueError where it cannot be."""
        model = self.target(dict(case.load))
        line = case.line.partition(", ")[0] if case.group == "selections" else case.line
        line = line.replace("{draft}", str(self.draft)).replace("{datastore}", str(self.datastore))
        return specjax.Engine(model, line)


def command(*words: str, **env: str) -> Any:
    """Runs the command line, and says what it took (`resource.struct_rusage`).

    Raises:
      ValueError: with the end of what it said, where it fails.
    """
    with TemporaryFile("w+") as said:
        asked = [sys.executable, "-m", "specjax", *words]
        running = subprocess.Popen(asked, stdout=said, stderr=said, env={**os.environ, **env})
        _, status, took = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().strip().splitlines()
    if running.returncode:
        raise ValueError(lines[-1] if lines else f"exit {running.returncode}")
    return took


def highest() -> int:
    """Bytes that this process has held at most since it was asked before, where the system says."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


# ---- what is measured -------------------------------------------------------------------------------------------------


def asked(case: Case, bench: Bench) -> tuple[list[str], list[Sampling]]:
    """Prompts, and how each is completed: all of them in each way, or each in its own."""
    named = lambda value: str(bench.hmm) if value == "{hmm}" else value
    given = [{name: named(value) for name, value in own.items()} for own in case.samplings or USUAL]
    samplings = [Sampling(**own, seed=1, max_new_tokens=LONGEST) for own in given]
    if case.samplings is WARPED:
        return [PROMPTS[i % len(PROMPTS)] for i in range(len(samplings))], samplings
    return [prompt for _ in samplings for prompt in PROMPTS], [own for own in samplings for _ in PROMPTS]


def measured(case: Case, bench: Bench) -> dict[str, Any]:
    """A row: texts, tokens a step, seconds, bytes; or what refuses it."""
    about = {"group": case.group, "name": case.name, "meant": case.meant, "like": case.like}
    try:
        return about | (by_command(case, bench) if case.devices else by_engine(case, bench))
    except ValueError as error:
        return about | {"refused": str(error).replace(str(bench.draft), "{draft}").replace(f"{HERE.parents[1]}/", "")}


def by_engine(case: Case, bench: Bench) -> dict[str, Any]:
    """Two calls of one engine."""
    prompts, samplings = asked(case, bench)
    highest()
    engine, seconds = bench.engine(case), []
    for _ in range(2):
        began = time.process_time()
        records = engine.generate(prompts, sampling=samplings, chat=True, **case.options)
        seconds.append(round(time.process_time() - began, 1))
    greedy = [not own.temperature for own in samplings]
    return {"first": seconds[0], "warm": seconds[1], "bytes": highest()} | texts_of(
        [(r.new_tokens, r.steps, r.tokens, r.text) for r in records], greedy
    )


def by_command(case: Case, bench: Bench) -> dict[str, Any]:
    """A job over a file."""
    prompts, samplings = asked(case, bench)
    source, target = bench.scratch / "prompts.jsonl", bench.scratch / "records.jsonl"
    target.unlink(missing_ok=True)
    options = [
        {k: v for k, v in vars(own).items() if v is not None and v != getattr(Sampling(), k)} for own in samplings
    ]
    lines = [{"prompt": prompt} | own for prompt, own in zip(prompts, options, strict=True)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = f"--xla_force_host_platform_device_count={case.devices}"
    files = ("--input", str(source), "--output", str(target))
    took = command("generate", "--model", MODEL, "--chat", *case.line.split(), *files, XLA_FLAGS=flags)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    found = [(r["new_tokens"], r["steps"], r["tokens"], r["text"]) for r in records]
    return {"first": round(took.ru_utime + took.ru_stime, 1), "bytes": 1024 * took.ru_maxrss} | texts_of(
        found, [not own.temperature for own in samplings]
    )


def texts_of(found: list[tuple[int, int, list[int], str]], greedy: list[bool]) -> dict[str, Any]:
    """What a row says of its texts."""
    new, steps, tokens, texts = zip(*found, strict=True)
    return {
        "tokens_per_step": round(sum(new) / max(sum(steps), 1), 2),
        "greedy": greedy,
        "tokens": list(map(list, tokens)),
        "texts": list(texts),
    }


def run(only: list[str]) -> list[dict[str, Any]]:
    """The rows, in the order of the cases; each is saved as it is done."""
    known = {key(row): row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    wanted = [case for case in cases() if any(word in f"{case.group} {case.name}" for word in only or [""])]
    todo = [case for case in wanted if only or (case.group, case.name) not in known]
    jax.config.update("jax_enable_compilation_cache", False)
    with TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch)) if todo else None
        for number, case in enumerate(todo):
            print(f"{number + 1} of {len(todo)}: {case.group}, {case.name}", flush=True)
            known[case.group, case.name] = measured(case, bench)
            rows = [known[case.group, case.name] for case in cases() if (case.group, case.name) in known]
            RESULTS.write_text('{"rows": ' + by_line(rows) + "}\n")
            jax.clear_caches()
            gc.collect()
    return [known[case.group, case.name] for case in cases() if (case.group, case.name) in known]


def key(row: dict[str, Any]) -> tuple[str, str]:
    """What tells rows apart."""
    return row["group"], row["name"]


# ---- what is said of it -----------------------------------------------------------------------------------------------


def other(row: dict[str, Any], plain: dict[str, Any], greedy: bool) -> list[int]:
    """Which texts are not plain decoding's, of the greedy or the drawn ones."""
    pairs = enumerate(
        zip(row["tokens"], plain["tokens"], row["greedy"], strict=False)
    )  # a search has greedy ones alone
    return [at for at, (ours, theirs, own) in pairs if own == greedy and ours != theirs]


def cell(row: dict[str, Any], rows: dict[tuple[str, str], dict[str, Any]], greedy: bool) -> str:
    """Whether texts are plain decoding's."""
    if greedy not in row["greedy"]:
        return ""
    loaded = row["name"].rpartition(" ")[0]
    like = (row["group"], row["like"] if not loaded or row["like"] is None else f"{loaded} {row['like']}")
    plain = rows.get(like if row["like"] is not None else ("drafters", "none"))
    if row["meant"] not in (SAME, GREEDY) or (row["meant"] == GREEDY and not greedy) or plain is None:
        return "not meant to be"
    found, count = other(row, plain, greedy), row["greedy"].count(greedy)
    return "yes" if not found else f"no: {len(found)} of {count}"


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown, a table a group."""
    known = {key(row): row for row in rows}
    head = ["greedy text as plain", "drawn text as plain", "tokens per step", "peak GB", "first s", "warm s"]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines = []
        for row in (row for row in rows if row["group"] == group):
            if "refused" in row:
                lines.append([f"`{row['name']}`", f"refused: {row['refused']}", *[""] * 5])
                continue
            why = "" if row["meant"] in (SAME, GREEDY) else f" ({row['meant']})"
            texts = [cell(row, known, greedy=own) for own in (True, False)]
            figures = [f"{row['tokens_per_step']:.2f}", f"{row['bytes'] / 1e9:.1f}", row["first"], row.get("warm", "")]
            lines.append([f"`{row['name']}`{why}", *texts, *figures])
        yield from ("", f"{group.capitalize()}:", "")
        yield from table(["way", *head], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="ways whose group or line holds one, anew"
    )
    parser.add_argument("--show", action="store_true", help="measure nothing: the tables of results.json")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"] if options.show else run(options.only)
    text = "\n".join(tables(rows))
    page = HERE / "README.md"
    if page.exists():
        page.write_text(MARKED.sub(lambda _: f"<!-- measured -->\n{text}\n\n<!-- end -->", page.read_text()))
    print(text)


if __name__ == "__main__":
    main()
