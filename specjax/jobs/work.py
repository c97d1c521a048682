"""A job's engine, its items, and the manifest that decides whether another run is the same job."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax

from specjax import models
from specjax.jobs import jsonl
from specjax.jobs.learn import LearningEngine, learning_engine
from specjax.jobs.manifest import fingerprint, hash_json, hash_list, named_folders
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item
from specjax.jobs.spool import Spool
from specjax.models import generation
from specjax.sampling_params import FIELDS, USUAL, is_set
from specjax.serve.disaggregated import disjoint
from specjax.serve.engine import Engine
from specjax.serve.options import read_size
from specjax.serve.pipelined import PipelinedEngine
from specjax.serve.prefix_cache import TWICE, PrefixCache
from specjax.serve.request import Record, Request, several
from specjax.serve.sampling import MAX_NEW_TOKENS
from specjax.serve.selecting import Chooser
from specjax.serve.text import user_turn
from specjax.sharding import distributed, make_mesh
from specjax.terminal import note

Value = TypeVar("Value")
Fault = tuple[int | None, str | None]
"""A line's number, and why it cannot be used."""


class FromLines(Protocol):
    """Options of a command that reads lines.

    Attributes:
      input: the file.
      strict: whether a bad line ends the job.
    """

    @property
    def input(self) -> str | None: ...

    @property
    def strict(self) -> bool: ...


def make_engine(options: JobOptions, texts: int) -> Engine:
    """The engine for a job with this number of prompts.

    Raises:
      ValueError: if its options cannot be used.
    """
    chooser = Chooser.of(options.select, options.num_return_sequences)
    way, _ = options.way, options.of_prompts  # errors in them are reported before a model is loaded
    if options.prefix_cache is not None and options.shared_prefix:
        raise ValueError(TWICE)
    cache = None if options.prefix_cache is None else PrefixCache(read_size(options.prefix_cache, "--prefix-cache"))
    rows = min(options.batch_size, texts * options.num_return_sequences)
    keeps = options.logprobs or chooser is not None and chooser.selection.reads_certainty
    drafts_on = None
    if options.draft_mesh is None:
        mesh = make_mesh(options.mesh)
    else:
        mesh, drafts_on = disjoint(options.mesh, options.draft_mesh, "--draft-mesh")
    if mesh is not None and jax.process_count() > 1:
        distributed.meet(mesh)  # before one process reads for longer than the others wait
    how: dict[str, Any] = options.of_model | {"mesh": mesh}
    model = models.load(**how)
    more: dict[str, Any] = {"mesh": mesh, "logprobs": keeps, "rows": rows, "prefix_cache": cache}
    if options.learn is not None:
        engine = learning_engine(options, model, **more)
    elif drafts_on is not None:
        engine = PipelinedEngine(model, way, draft_mesh=drafts_on, **more)
    else:
        engine = Engine(model, way, **more)
    engine.check_stop(options.stop)
    engine.check_completions(options.num_return_sequences)
    if options.prompt_logprobs:
        engine.prompt_reader()  # refuses models that give prompts no log-probabilities
    return engine


def make_items(options: JobOptions, engine: Engine, given: Sequence[Any]) -> Sequence[Item]:
    """The items to complete: a request for every usable line or prompt, and a failed record for the others.

    Raises:
      ValueError: if no line is usable; with `strict`, if one is not.
    """
    defaults = options.of_prompts.given
    if not options.input:
        items: Sequence[Item] = [
            engine.request(user_turn(prompt, options.chat), suffix=options.suffix, **defaults) for prompt in given
        ]
    else:
        domains: dict[str | None, None] = {}

        def lines() -> Iterator[jsonl.Line]:
            for line in given:
                if line.error is None:
                    domains[line.domain] = None
                yield dataclasses.replace(line, prompt=user_turn(line.prompt, options.chat))

        items = kept(options, jsonl.to_requests(lines(), engine, defaults), failure)
        if isinstance(engine, LearningEngine):
            engine.prepare(domains)
        elif any(domains) and distributed.is_first():
            note("lines have a domain, which only drafts that learn have a use for (--learn)")
    if (chooser := Chooser.of(options.select, options.num_return_sequences)) is not None:
        chooser.check(engine, (item for item in items if isinstance(item, Request)))
        return items
    if options.num_return_sequences == 1:
        return items
    every = (one for item in items for one in several(item, options.num_return_sequences))
    return Spool(every) if options.input else list(every)


def failure(item: Item) -> Fault | None:
    """What is wrong with an item's line, for `kept`."""
    return (item.line, item.error) if isinstance(item, Record) else None


def kept(options: FromLines, values: Iterable[Value], fault: Callable[[Value], Fault | None]) -> Spool[Value]:
    """What became of every line, in a spool.

    Args:
      options: of the command.
      values: one for each line, as they come.
      fault: what is wrong with a line; None: it is usable.

    Raises:
      ValueError: if no line is usable; with `strict`, if one is not.
    """
    found: Spool[Value] = Spool()
    first, wrong = None, 0
    for value in values:
        found.append(value)
        if (own := fault(value)) is None:
            continue
        if options.strict:
            raise ValueError(f"{options.input}, line {own[0]}: {own[1]}")
        first, wrong = first or own, wrong + 1
    if wrong == len(found):
        why = f"; line {first[0]}: {first[1]}" if first else ""
        raise ValueError(f"the input file {options.input!r} has no valid line{why}")
    return found


def make_manifest(options: JobOptions, engine: Engine, given: Sequence[Any]) -> dict[str, Any]:
    """The settings that must be equal for a job to resume. Batch size and mesh are left out: they change no text; nor does
    a draft that learns in the job."""
    folders = named_folders([options.decode, options.drafter])
    if options.learn is not None:
        learnt = Path(options.learn).resolve()
        folders = {name: own for name, own in folders.items() if not Path(name).resolve().is_relative_to(learnt)}
    given_options = options.of_prompts.given
    # with a shared prefix or a prefix cache of any size, programs have other shapes, and near-ties may be decided differently
    flags = {name: True for name in ("shared_prefix", "prefix_cache", "chat") if getattr(options, name)}
    flags |= {} if options.select is None else {"select": options.select}
    flags |= {} if options.longest is None else {"longest": options.longest}
    usual = [name for name, _ in USUAL]
    every = {name: field.default for name, field in FIELDS.items()} | {"max_new_tokens": MAX_NEW_TOKENS}
    every |= generation.defaults(engine.model) | given_options
    rare = {name: every[name] for name in FIELDS if name not in usual and is_set(name, every[name])}
    each = itertools.chain([every], (line.options for line in given if isinstance(line, jsonl.Line)))
    naming = {name: field.metadata["file"] for name, field in FIELDS.items() if "file" in field.metadata}
    lines = {(name, line) for own in each for name in naming if isinstance(line := own.get(name), str)}
    named = {file for name, line in lines if (file := naming[name](line))}
    files = {str(file): hash_json(file.read_text()) for file in sorted(named)}
    run = ("num_return_sequences", "logprobs", "suffix", "prompt_logprobs")
    return {
        "version": 2,
        "model": _model(engine),
        "decoding": {"decode": options.decode, "drafter": options.drafter} | flags,
        "folders": folders | files,
        "sampling": {name: every[name] for name in ("max_new_tokens", *usual)}
        | json.loads(json.dumps(rare))
        | {"stop": list(given_options.get("stop", ())), "ignore_eos": given_options.get("ignore_eos", False)}
        | {name: getattr(options, name) for name in run},
        "seed": given_options["seed"],
        "input": identity_of(given),
        "output": {"order": "as finished" if options.unordered else "of the input"},
    }


def score_manifest(engine: Engine, given: Sequence[Any]) -> dict[str, Any]:
    """The same for `specjax score`."""
    return {"version": 2, "command": "score", "model": _model(engine), "input": identity_of(given)}


def _model(engine: Engine) -> dict[str, Any]:
    model = engine.model
    assert model.path is not None  # a command's model is read from a folder
    added = {"adapter": [fingerprint(folder) for folder in model.adapter]} if model.adapter else {}
    added |= {} if model.weights is None else {"weights": model.weights}
    added |= {} if model.cache_dtype is None else {"cache_dtype": model.cache_dtype}
    added |= {} if model.reduce_dtype is None else {"reduce_dtype": model.reduce_dtype}
    return {"name": model.name, "fingerprint": fingerprint(model.path), "dtype": model.dtype_name} | added


def identity_of(given: Sequence[Any]) -> dict[str, Any]:
    """A hash of lines or prompts, and their number. The files in which lines stand and their domains are left out, and so are
    fields of the way to decode that a line does not set."""
    plain = (_of_line(line) if isinstance(line, jsonl.Line) else line for line in given)
    return {"sha256": hash_list(plain), "records": len(given)}


def _of_line(line: jsonl.Line) -> dict[str, Any]:
    left_out = lambda name, value: name in ("where", "domain") or name in jsonl.WAYS and value is None
    return {name: value for name, value in vars(line).items() if not left_out(name, value)}
