"""`specjax generate`: completes prompts given as words, on stdin or in a file of JSON lines."""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from specjax.jobs import fleet, hosts, jsonl, parquet
from specjax.jobs.manifest import fingerprint, hash_json, named_folders
from specjax.jobs.output import Item, Output, check
from specjax.jobs.run import complete, follow
from specjax.serve.request import Record, Request
from specjax.sharding.distributed import from_first, is_first
from specjax.terminal import BadInput, add_model_options, bad_input, complain, note


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax generate`."""
    add_model_options(parser)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to complete (default: stdin, where that is no terminal)")
    add("--drafter", help="name:field=value,...; see `specjax drafters`; a+b fuses two (default: prompt_lookup)")
    add("--verifier", help="see `specjax verifiers` (default: coupled)")
    add("--unmask", metavar="POLICY", help="of a diffusion model: see `specjax policies` (default: threshold)")
    add("--cache", metavar="POLICY", help="of a diffusion model: see `specjax policies` (default: prefix)")
    add("--block-length", type=int, metavar="N", help="of a diffusion model (default: 32)")
    add("--cfg-scale", type=float, metavar="S", help="of a diffusion model: classifier-free guidance (default: off)")
    add("--suffix", metavar="TEXT", help="a diffusion model fills in --max-new-tokens tokens before it")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 is off")
    add("--top-p", type=float, default=1.0, help="keep the smallest likeliest set of this mass; 1 is off")
    add("--min-p", type=float, default=0.0, help="keep tokens of at least this share of the likeliest's probability")
    add("--repetition-penalty", type=float, default=1.0, help="1 is off")
    add("--num-return-sequences", type=int, default=1, metavar="N", help="independent completions of each prompt")
    add("--stop", action="append", default=[], metavar="STRING", help="ends a text and is left out; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--batch-size", type=int, default=8, help="rows decoded together; changes speed, never text")
    add(
        "--input",
        metavar="FILE.jsonl",
        help="lines of {prompt or messages, optionally id, suffix and generation options}; or a table, FILE.parquet",
    )
    add(
        "--output",
        metavar="FILE.jsonl",
        help="append records there (or FILE.parquet); after a kill the same command goes on where it was",
    )
    add("--shared-prefix", action="store_true", help="prefill what all prompts begin with once")
    add("--unordered", action="store_true", help="records as they finish, not in the order of --input")
    add("--progress", action="store_true", help="say how far it is every ten seconds where stderr is no terminal")
    add("--strict", action="store_true", help="stop at the first bad line of --input, before any work")
    add("--json", action="store_true", help="print records as JSON, one a line")
    add("--logprobs", action="store_true", help="records carry log-probabilities of their tokens")
    hosts.add_options(parser)
    fleet.add_options(parser)


def command(args: argparse.Namespace) -> int:
    """Completes prompts for parsed options; returns the exit status."""
    with bad_input():
        several = hosts.asked(args)
        fleet.check(args)
    if args.ray is not None:
        return _on_ray(args)
    if several:
        return hosts.together(args, args.words, lambda first: _here(args, several, first))
    return _here(args)


def _here(args: argparse.Namespace, several: bool = False, first: bool = True) -> int:
    with bad_input():
        given = _read(args, first)
        if several:
            own = (*hosts.OPTIONS, "words", "prompts", "input", "output", "progress")
            options = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in own}
            hosts.check_same({**options, "--input" if args.input else "prompt": _plain(given)})
        engine = make_engine(args)
        items = make_items(args, engine, given)
        if args.shared_prefix:
            engine.shared_prefix([item for item in items if isinstance(item, Request)])  # says where it cannot be
        manifest = make_manifest(args, engine, given) if args.output or several else {}
        if several:
            hosts.check_same(manifest)
        output = _open(args, manifest, items) if first else None
    status = _write(args, engine, items, output) if first else follow(args, engine, items)
    return int(from_first(np.asarray(status, np.int32)))  # JAX would not wait so long at its end as a table may take


def _on_ray(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        with bad_input():
            given = _read(args, True)
            workers, items, manifest = stack.enter_context(fleet.fleet(args, given))
            output = _open(args, manifest, items)
        try:
            return _write(args, workers, items, output)
        except fleet.WorkerError as error:
            complain(f"{error}; {hosts.stand(args)}")
            return hosts.LOST


def _open(args: argparse.Namespace, manifest: dict[str, Any], items: list[Item]) -> Output | None:
    return Output(_lines_of(args.output), manifest, items, not args.unordered) if args.output else None


def _write(args: argparse.Namespace, engine: Any, items: list[Item], output: Output | None) -> int:
    if args.shared_prefix:
        _say_shared(engine, items)
    if output is None:
        return complete(args, engine, items, None)
    with contextlib.closing(output):
        status = complete(args, engine, items, output)
    if parquet.is_parquet(args.output) and status in (0, 1):
        try:
            parquet.write(args.output, output.path)
        except OSError as error:
            raise BadInput(
                f"cannot write {args.output!r}: {error.strerror}; {output.path} holds every record"
            ) from error
    return status


def _lines_of(output: str) -> str:
    """Where records are appended: beside a table, which can only be written whole, a file of JSON lines."""
    return f"{output}.jsonl" if parquet.is_parquet(output) else output


def _read(args: argparse.Namespace, first: bool) -> list[Any]:
    """The lines of the input, or prompts. What can be wrong with options and files is found here, before any work."""
    for name in ("num_return_sequences", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.input and args.prompts:
        raise ValueError("give PROMPT or --input, not both")
    if args.input and args.suffix:
        raise ValueError("--suffix goes with PROMPT; lines of --input have a field of that name")
    if args.strict and not args.input:
        raise ValueError("--strict is about the lines of --input, and there is none")
    if args.unordered and not args.input:
        raise ValueError("--unordered is about the order of --input, and there is none")
    if args.output and first:
        _check_output(args.output, args.input)
    return _read_lines(args) if args.input else args.prompts or [_read_stdin()]


def make_engine(args: argparse.Namespace) -> Any:
    """The engine of parsed options.

    Raises:
      ValueError: where they cannot be used.
    """
    from specjax.serve.engine import Engine
    from specjax.serve.request import check_options

    check_options({name: getattr(args, name) for name in jsonl.OPTIONS})
    engine = Engine(
        args.model, args.drafter, args.verifier, unmask=args.unmask, cache=args.cache, block_length=args.block_length,
        cfg_scale=args.cfg_scale, dtype=args.dtype, mesh=args.mesh, logprobs=args.logprobs,
    )  # fmt: skip
    engine.check_stop(args.stop)
    return engine


def make_items(args: argparse.Namespace, engine: Any, given: list[Any]) -> list[Item]:
    """What is to be completed: a request for every line or prompt that can become one, and a failed record for the others.

    Raises:
      ValueError: where no line can, or with `--strict` where one cannot.
    """
    defaults = {name: getattr(args, name) for name in jsonl.OPTIONS}
    if not args.input:
        items: list[Item] = [engine.request(prompt, suffix=args.suffix, **defaults) for prompt in given]
    else:
        items = list(jsonl.to_requests(given, engine, defaults))
        _check_lines(args, [(item.line, item.error) for item in items if isinstance(item, Record)], len(items))
    if args.num_return_sequences > 1:
        samples = range(args.num_return_sequences)
        several = lambda item: (
            [item] if isinstance(item, Record) else [dataclasses.replace(item, sample=i) for i in samples]
        )
        items = [one for item in items for one in several(item)]
    return items


def _plain(given: list[Any]) -> list[Any]:
    return [dataclasses.asdict(line) if isinstance(line, jsonl.Line) else line for line in given]


def _say_shared(engine: Any, items: list[Item]) -> None:
    from specjax.serve.engine import SHORTEST_PREFIX

    requests = [item for item in items if isinstance(item, Request)]
    count = len(engine.shared_prefix(requests))
    if count:
        note(f"the {len(requests)} prompts share their first {count} tokens, which are prefilled once")
    else:
        note(
            f"--shared-prefix does nothing here: there are no two prompts, or they share fewer than {SHORTEST_PREFIX} tokens"
        )


def _check_output(output: str, source: str | None) -> None:
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"--output {output!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {output!r}: there is no folder {str(path.parent)!r}; make it first")
    if source and path.exists() and Path(source).exists() and path.samefile(source):
        raise ValueError("--output must not be the --input file")
    lines = _lines_of(output)
    check(lines)
    if lines != output:
        parquet.check()
        if path.exists() and not Path(lines).exists():
            raise ValueError(f"the output file {output!r} exists: move it away or choose another --output")


def _read_lines(args: argparse.Namespace) -> list[jsonl.Line]:
    lines = (parquet if parquet.is_parquet(args.input) else jsonl).read(args.input)
    _check_lines(args, [(line.number, line.error) for line in lines if line.error is not None], len(lines))
    unknown = sorted({key for line in lines for key in line.unknown})
    if unknown and is_first():
        note(f"{args.input}: fields without a meaning here are left out: {', '.join(map(repr, unknown))}")
    return lines


def _check_lines(args: argparse.Namespace, bad: list[tuple[int | None, str | None]], count: int) -> None:
    if bad and args.strict:
        raise ValueError(f"{args.input}, line {bad[0][0]}: {bad[0][1]}")
    if len(bad) == count:
        why = f"; line {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise ValueError(f"the input file {args.input!r} has no valid line{why}")


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin")
    text = sys.stdin.buffer.read().decode()
    text = text.removesuffix("\n")
    if not text:
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin (it is empty)")
    return text


def make_manifest(args: argparse.Namespace, engine: Any, given: list[Any]) -> dict[str, Any]:
    """What must be equal for a job to go on. Batch size and mesh change no text."""
    model = engine.model
    decoding = ("drafter", "verifier", "unmask", "cache", "block_length", "cfg_scale")
    return {
        "version": 1,
        "model": {"name": model.name, "fingerprint": fingerprint(model.path), "dtype": model.dtype.name},
        "decoding": {name: getattr(args, name) for name in decoding}
        | ({"shared_prefix": True} if args.shared_prefix else {}),  # other program shapes: near-ties may fall otherwise
        "folders": named_folders([getattr(args, name) for name in decoding]),
        "sampling": {name: getattr(args, name) for name in jsonl.OPTIONS if name != "seed"}
        | {name: getattr(args, name) for name in ("stop", "ignore_eos", "num_return_sequences", "logprobs", "suffix")},
        "seed": args.seed,
        "input": {"sha256": hash_json(_plain(given)), "records": len(given)},
        "output": {"order": "as finished" if args.unordered else "of the input"},
    }
