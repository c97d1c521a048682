"""`specjax check-head`: how a trained head was read, how many of its drafts the target accepts, and whether it fits."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from specjax import models
from specjax.jobs import jsonl
from specjax.jobs.files import read_lines
from specjax.jobs.work import failure, kept
from specjax.serve.engine import Engine
from specjax.serve.options import ModelOptions, RunOptions, check_least, option, same
from specjax.serve.record_bar import bar_fits, record_bar
from specjax.serve.request import Request
from specjax.terminal import bad_input, flag, note, write
from specjax.viz.data import survival

FITS = 0.5
"""For a head trained for its target, the share of accepted first draft tokens is above this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckHeadOptions:
    """Options of `specjax check-head`; see the help of each."""

    model: str = option(
        dataclasses.MISSING,
        "the target: folder, shipped name or hub id; without PROMPTS a config.json is enough",
        metavar="MODEL",
        positional=True,
    )
    head: str = option(
        dataclasses.MISSING,
        "folder, shipped name or hub id of a head, or a drafter's line such as 'eagle3:model=FOLDER,taps=1 15 28'",
        metavar="HEAD",
        positional=True,
    )
    prompts: tuple[str, ...] = option(
        (),
        "text to measure acceptance on, or files with lines of {prompt or messages}",
        metavar="PROMPTS",
        nargs="*",
        positional=True,
    )
    max_new_tokens: int = option(64, "new tokens per prompt", metavar="N", least=1)
    batch_size: int = same(RunOptions, "batch_size")
    dtype: str | None = same(ModelOptions, "dtype")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    json: bool = option(False, "print one JSON object")
    strict: bool = option(False, "stop at the first bad line of PROMPTS, before any work")
    input: str = option("the prompts", "", hidden=True)


def command(options: CheckHeadOptions) -> int:
    """`specjax check-head`."""
    from specjax.assembly.heads import head_line, named_head, record

    with bad_input():
        check_least(options, flag)
        lines = _lines(options)
        target = _target(options)
        if target.masked is not None:
            raise ValueError(f"{target.name} is {target.kind}: heads are for autoregressive ones")
        name, head = named_head(head_line(options.head), target)
        said = record(name, head)
        engine = Engine(target, drafter=(head.drafter, head.params)) if lines else None
        requests = [] if engine is None else _requests(options, engine, lines)
    if engine is not None:
        said |= measured(engine, requests, options.batch_size, said)
    write(json.dumps(said) + "\n" if options.json else shown(said))
    return 0


def _lines(options: CheckHeadOptions) -> list[jsonl.Line]:
    """The prompts: a word that names a file stands for its lines."""
    found: list[jsonl.Line] = []
    for word in options.prompts:
        lines = read_lines(options, word) if Path(word).is_file() else [jsonl.Line(1, word)]
        found += [dataclasses.replace(line, number=len(found) + i) for i, line in enumerate(lines, start=1)]
    return found


def _target(options: CheckHeadOptions) -> models.Model:
    """The target; without weights if it has none and nothing is measured."""
    from specjax.models import orbax_folder
    from specjax.models.published_configs import CONFIGS

    path = Path(options.model)
    bare = path.is_file() or (options.model in CONFIGS and not path.exists())
    if path.is_dir() and not orbax_folder.is_one(path):
        bare = not any(path.glob("*.safetensors*"))
    if bare and not options.prompts and not options.adapter:
        return models.abstract(options.model, dtype=options.dtype)
    return models.load(options.model, dtype=options.dtype, adapter=options.adapter)


def _requests(options: CheckHeadOptions, engine: Engine, lines: list[jsonl.Line]) -> list[Request]:
    """The requests; greedy unless a line says otherwise."""
    items = kept(options, jsonl.to_requests(lines, engine, {"max_new_tokens": options.max_new_tokens}), failure)
    if line := engine.left_out({"max_new_tokens": options.max_new_tokens}, items):
        note(line)
    return [item for item in items if isinstance(item, Request)]


def measured(engine: Engine, requests: list[Request], batch_size: int, said: dict[str, Any]) -> dict[str, Any]:
    """Acceptance by depth over some requests, as in the bench, and the verdict on the head.

    Args:
      engine: drafts with the head.
      requests: to complete.
      batch_size: rows decoded together.
      said: the facts read from the head.
    """
    counts: list[int] = []
    with record_bar(len(requests)) if bar_fits() else contextlib.nullcontext(lambda *_: None) as advance:
        for done in engine.run(requests, batch_size=batch_size):
            own = done.accepted or []
            counts = [a + b for a, b in zip(counts or [0] * len(own), own, strict=True)]
            advance(1, "")
    acceptance = survival(tuple(counts))
    return {"acceptance": list(acceptance), "steps": sum(counts), "verdict": verdict(acceptance, said)}


def verdict(acceptance: tuple[float, ...], said: dict[str, Any]) -> str:
    """The verdict on a head from its acceptance by depth, in a sentence; if it is low, with likely causes.

    Args:
      acceptance: the share of steps that accepted at least 1, 2, ... draft tokens.
      said: what was read of the head.
    """
    first = acceptance[0] if acceptance else 0.0
    if first > FITS:
        return f"acceptance at depth 1 is {first:.2f}: the head fits its target"
    start = f"acceptance at depth 1 is {first:.2f}: a head that fits its target has more than {FITS}; likely causes: "
    if said["format"] == "specjax":  # its folder names its target and fields
        return start + "it was trained too little, or on other text than these prompts"
    causes = []
    taps, layers = said["taps"], said["target"]["layers"]
    if taps:
        others = [[tap + shift for tap in taps] for shift in (-1, 1)]
        lines = [f"taps={' '.join(map(str, o))}" for o in others if o[0] >= 0 and o[-1] < layers]
        causes.append(f"its ids count layers in another way (try {' or '.join(lines)})" if lines else "other taps")
    if said["norms"].get("norm_output"):
        causes.append("norm_output of a file that meant another thing by it (try norm_output=false)")
    causes += ["it was trained for another target, or another version of it", "prompts without its chat template"]
    return start + ", ".join(causes)


def shown(said: dict[str, Any]) -> str:
    """The record as lines of text."""
    taps = ", ".join(map(str, said["taps"]))
    own = said["target"]
    rows = {
        "head": f"{said['drafter']}, format {said['format']}",
        "taps": f"the outputs of layers {taps} of {own['layers']}" if taps else "the final hidden state",
        "vocabulary": f"{said['vocabulary']} of the target's {own['vocabulary']} tokens",
        "norms": ", ".join(name for name, on in said["norms"].items() if on) or "the layer's own",
        "tree": f"{said['tree']['nodes']} nodes, {said['tree']['depth']} deep",
    }
    lines = [f"{name:11} {text}" for name, text in rows.items()] + [f"{'note':11} {note}" for note in said["notes"]]
    if "acceptance" in said:
        shares = " ".join(f"{share:.2f}" for share in said["acceptance"])
        lines += [f"{'acceptance':11} {shares} by depth, over {said['steps']} steps", said["verdict"]]
    return "\n".join(lines) + "\n"
