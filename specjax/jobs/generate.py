"""`specjax generate`: completes prompts from the command line, stdin or a file of JSON lines."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.jobs import batch_api, fleet, hosts, jsonl
from specjax.jobs.completer import Completer, OnEngine, Whole
from specjax.jobs.files import check_beside, check_output, finish, journal, packed, read_lines, read_prompt
from specjax.jobs.learn import LearningEngine, check_learns
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item, Output
from specjax.jobs.page import check as check_page
from specjax.jobs.page import file_of
from specjax.jobs.run import complete, follow
from specjax.jobs.work import identity_of, make_engine, make_items, make_manifest
from specjax.models import DEFAULT_MODEL
from specjax.models.remote import is_url
from specjax.serve import prefix_file
from specjax.serve.engine import SHORTEST_PREFIX, Engine
from specjax.serve.options import check_least
from specjax.serve.request import Request
from specjax.sharding.distributed import from_first
from specjax.terminal import bad_input, complain, flag, note, talking

_MAY_DIFFER = ("prompts", "input", "output", "progress", "page", "metrics", "verbose")
"""Options that may differ between processes of a job; the content of the input is compared."""


def command(options: JobOptions) -> int:
    """Completes prompts; returns the exit status."""
    with bad_input():
        several = hosts.asked(options, options.mesh)
        fleet.check(options)
        if options.learn is not None:
            check_learns(options)
        if options.draft_mesh is not None:
            _check_draft_mesh(options)
        if options.prefix_cache_file is not None:
            _check_prefix_file(options)
    if options.ray is not None:
        return _on_ray(options)
    if several:
        return hosts.together(options, hosts.stand(options.file), lambda first: _here(options, several, first))
    return _here(options)


def _check_draft_mesh(options: JobOptions) -> None:
    """Raises ValueError if other options of a job leave its drafter no mesh of its own."""
    if options.ray is not None or options.distributed or options.coordinator is not None:
        raise ValueError("--draft-mesh is for a job of one process: leave --ray, --distributed and --coordinator out")
    if options.learn is not None:
        raise ValueError("--learn teaches a draft model on the target's devices: leave --draft-mesh or --learn out")
    if options.mesh is None:
        raise ValueError("--draft-mesh takes the devices that follow those of --mesh: give --mesh too, such as model=1")


def _check_prefix_file(options: JobOptions) -> None:
    """Raises ValueError if a job has no prefix cache for its file, or the file cannot be written."""
    file = options.prefix_cache_file or ""
    if options.prefix_cache is None:
        raise ValueError("--prefix-cache-file is for a prefix cache: give its size too, such as --prefix-cache 256MB")
    if options.ray is not None or options.distributed or options.coordinator is not None:
        raise ValueError(
            "--prefix-cache-file is for a job of one process: leave --ray, --distributed and --coordinator out"
        )
    if options.learn is not None:
        raise ValueError(
            "--learn changes the draft model, and what it has read: leave --prefix-cache-file or --learn out"
        )
    if not os.access(Path(file).parent, os.W_OK):
        raise ValueError(f"--prefix-cache-file {file!r}: there is no such folder, or it cannot be written to")


def _keep_prefixes(options: JobOptions, engine: Engine) -> None:
    """Writes the prefix cache to its file. Where that fails, the texts are written nevertheless."""
    if options.prefix_cache_file is not None and engine.prefix_cache is not None:
        try:
            prefix_file.save(engine, options.prefix_cache_file)
        except OSError as error:
            complain(f"cannot write the prefix cache to {options.prefix_cache_file!r}: {error}")


def _here(options: JobOptions, several: bool = False, first: bool = True) -> int:
    with bad_input():
        given = _read(options, first)
        if several:
            same = hosts.shared(options, _MAY_DIFFER)
            hosts.check_same({**same, "--input" if options.input else "prompt": identity_of(given)})
        with talking(options.verbose and first):
            engine = make_engine(options, len(given))
            if options.prefix_cache_file is not None and Path(options.prefix_cache_file).exists():
                count = prefix_file.load(engine, options.prefix_cache_file)
                note(f"{count} blocks of earlier prompts are known from {options.prefix_cache_file}")
        items = make_items(options, engine, given)
        completer = OnEngine(engine, options, Whole.of(options, engine, items))
        manifest = make_manifest(options, engine, given) if options.file or several else {}
        if several:
            hosts.check_same(manifest)
        output = _open(options, manifest, items) if first else None
    if first and (line := engine.left_out(options.of_prompts.given, items)):
        note(line)
    status = _write(options, completer, items, output, given) if first else follow(options, completer, items)
    if isinstance(engine, LearningEngine):
        engine.keep()
    _keep_prefixes(options, engine)
    return int(from_first(np.asarray(status, np.int32)))  # writing a table may take longer than JAX waits at its end


def _on_ray(options: JobOptions) -> int:
    with contextlib.ExitStack() as stack:
        with bad_input():
            given = _read(options, True)
            workers, items, manifest = stack.enter_context(fleet.fleet(options, given))
            output = _open(options, manifest, items)
        if workers.left_out:
            note(workers.left_out)
        try:
            return _write(options, workers, items, output, given)
        except fleet.WorkerError as error:
            complain(f"{error}; {hosts.stand(options.file, '')}")
            return hosts.LOST


def _open(options: JobOptions, manifest: dict[str, Any], items: Sequence[Item]) -> Output | None:
    if options.file is None:
        return None
    return Output(journal(options.file, options.format), manifest, items, not options.unordered)


def _write(
    options: JobOptions, completer: Completer, items: Sequence[Item], output: Output | None, given: Sequence[Any]
) -> int:
    if options.shared_prefix:
        _say_shared(completer, items)
    if output is None or options.file is None:
        return complete(options, completer, items, None)
    with contextlib.closing(output):
        status = complete(options, completer, items, output)
    if status in (0, 1):
        finish(options.file, output, None if options.format is None else _results(options, completer, items, given))
    return status


def _results(
    options: JobOptions, completer: Completer, items: Sequence[Item], given: Sequence[jsonl.Line]
) -> batch_api.Results:
    read = lambda item: len(item.ids if item.source is None else item.source)
    sizes = {item.line: read(item) for item in items if isinstance(item, Request) and item.line is not None}
    chats = frozenset(line.number for line in given if batch_api.is_chat(line))
    return batch_api.Results(options.model or DEFAULT_MODEL, sizes, chats, completer.tokenizer)


def _read(options: JobOptions, first: bool) -> Sequence[Any]:
    """The lines of the input, or prompts. Errors in options and files are found here, before any work."""
    check_least(options, flag)
    if options.input and options.prompts:
        raise ValueError("give PROMPT or --input, not both")
    if options.input and options.suffix:
        raise ValueError("--suffix goes with PROMPT; lines of --input have a field of that name")
    if options.strict and not options.input:
        raise ValueError("--strict is for the lines of a file: give --input, or leave it out")
    if options.unordered and not options.input:
        raise ValueError("--unordered is for the lines of a file: give --input, or leave it out")
    form: jsonl.Form | None = None
    if options.format is not None:
        plain = options.file is not None and not is_url(options.file) and packed(options.file) is None
        batch_api.check(options.file, options.input, plain)
        if options.logprobs and options.ray is not None:
            raise ValueError("with --format openai and --logprobs, tokens are shown as text, which --ray does not know")
        form = batch_api.BatchForm(1 if options.select else options.num_return_sequences, options.logprobs)
    if first:
        check_page(options.page, options.metrics)
        beside = {"--page": options.page, "--metrics": file_of(options.metrics)}
        beside["--prefix-cache-file"] = options.prefix_cache_file
        check_beside(beside, options.file, options.input, options.format)
    if options.file and first:
        check_output(options.file, options.input, options.format)
    if options.input:
        return read_lines(options, options.input, form)
    return list(options.prompts) or [read_prompt()]


def _say_shared(completer: Completer, items: Sequence[Item]) -> None:
    count = sum(isinstance(item, Request) for item in items)
    if completer.prefix:
        note(f"the {count} prompts share their first {len(completer.prefix)} tokens, which are prefilled once")
    else:
        note(f"--shared-prefix does nothing here: a single prompt, or fewer than {SHORTEST_PREFIX} shared tokens")
