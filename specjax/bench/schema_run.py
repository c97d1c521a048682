"""`specjax bench schema`: JSONSchemaBench's protocol for any model, decoder, batch size and mesh."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from specjax.bench import alone
from specjax.bench import schema as suite
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.run import progress
from specjax.bench.schema import Made
from specjax.bench.spec_run import Compilations, as_prompt
from specjax.constrain import Table
from specjax.jobs import jsonl
from specjax.serve.sampling import check_options
from specjax.terminal import bad_input, note, write

ASKED = "Write one JSON value that is valid under this JSON Schema:\n"
USUAL = "prompt_lookup+forced"
"""The drafter beside plain decoding if none is named."""


@dataclasses.dataclass(frozen=True)
class Written:
    """The text for one schema. Rows that are decoded together have equal shares of seconds."""

    text: str | None
    tokens: list[int]
    steps: int
    seconds: float
    decode_seconds: float


@dataclasses.dataclass
class Contestant:
    """An engine and its requests, one for each schema.

    Attributes:
      decoder: the engine's line.
      constrained: whether its texts are.
      engine: a `specjax.serve.engine.Engine`.
      requests: see `Engine.request`.
      capacity: text buffer slots, the same for all.
      compilations: the process's.
    """

    decoder: str
    constrained: bool
    engine: Any
    requests: list[Any]
    capacity: int
    compilations: Compilations

    def lap(self, batch_size: int, advance: Callable[[], None]) -> list[Written]:
        """The texts for all schemas. A batch in which a program was compiled is decoded again, and the second time counts."""
        found = []
        for begin in range(0, len(self.requests), batch_size):
            own, before = self.requests[begin : begin + batch_size], self.compilations.count
            records = self._run(own, batch_size)
            found += self._run(own, batch_size) if self.compilations.count > before else records
            advance()
        return found

    def said(self, texts: Sequence[Written], right: Sequence[bool]) -> str:
        """What a lap showed, in one line."""
        tokens, steps = sum(len(one.tokens) for one in texts), sum(one.steps for one in texts)
        kind = "constrained" if self.constrained else "free"
        shares = f"{tokens} tokens, {tokens / max(steps, 1):.2f} per step, {_speed(texts):.1f} per second"
        return f"{self.decoder}, {kind}: {sum(right)} of {len(right)} valid, {shares}"

    def _run(self, requests: list[Any], batch_size: int) -> list[Written]:
        decoded, began = self.engine.timing.decode_seconds, time.perf_counter()
        records = list(self.engine.run(requests, batch_size=batch_size, capacity=self.capacity))
        seconds = (time.perf_counter() - began) / len(requests)
        decode = (self.engine.timing.decode_seconds - decoded) / len(requests)
        return [Written(own.text, own.tokens, own.steps, seconds, decode) for own in records]


def command(options: BenchOptions) -> int:
    """Runs the suite; returns the exit status."""
    with bad_input():
        if options.input is None:
            raise ValueError("bench schema needs a folder of schemas: give --input FOLDER")
        suite.jsonschema()
        check_options(options.of_prompts)
        schemas = suite.read(options.input, options.samples)
        own = options if options.drafter or options.decode else dataclasses.replace(options, drafter=(USUAL,))
        engines, skipped = engines_of(own)
        plain = next(iter(engines.values()))
        plain.vocabulary.check()
        asked = schemas if options.coverage else _fitting(options, plain, schemas)
        names = _alone(options.alone)
    for reason in skipped:
        note(reason)
    kind = options.kind or "json"
    with bad_input():  # what all constraints share is made before the clock runs, and what cannot be asked is said
        warm = suite.compiled({kind: {"const": 0}}, plain.vocabulary)
        for engine in () if options.coverage else engines.values():
            engine.request(_prompt(asked[0], engine), **options.of_prompts, constraint=warm)
    limit, beside = options.compile_limit or suite.COMPILE_LIMIT, {name: [] for name in [kind, *names] if names}
    with progress(len(asked)) as advance:
        made = []
        for schema in asked:
            one = suite.make(schema, kind, plain.vocabulary, limit)
            if names:
                texts = alone.texts_of(schema, plain.vocabulary, one.constraint)
                beside[kind].append(alone.Tried(one, alone.own_seconds(one.constraint, texts)))
                for name in names:
                    beside[name].append(alone.tried(name, schema, plain.vocabulary, texts, limit))
            made.append(
                dataclasses.replace(one, constraint=None) if options.coverage else one
            )  # thousands may be large
            advance("constraints")
    about = f"JSONSchemaBench, {plain.model.name}, {len(asked)} schemas, constraints {kind}"
    report: dict[str, Any] = {"about": about, "compile_seconds": suite.quantiles(made), "refused": suite.refused(made)}
    if names:
        report["alone"] = {name: alone.summary(found) for name, found in beside.items()}
    if options.coverage:
        report |= {"datasets": suite.by_dataset(made), "rows": []}
    else:
        report["about"] += (
            f", at most {options.new_tokens} tokens, batch {options.batch_size}, median of {options.repeats}"
        )
        report |= _texts(options, engines, made)
    if options.json:
        write(jsonl.dumps(report) + "\n")
    else:
        _tables(report)
    return 0


def _alone(given: str | None) -> list[str]:
    """The engines of `--alone`."""
    names = list(dict.fromkeys(name.strip() for name in (given or "").split(",") if name.strip()))
    if unknown := [name for name in names if name not in alone.ENGINES]:
        raise ValueError(f"--alone names {unknown[0]!r}: choose {' or '.join(alone.ENGINES)}")
    for name in names:
        if find_spec(name.replace("-", "_")) is None:
            raise ValueError(f"alone needs the package {name}: pip install 'specjax[constrain]'")
    return names


def _prompt(schema: Any, engine: Any) -> Any:
    text = ASKED + jsonl.dumps(schema.content)
    return as_prompt([{"role": "user", "content": text}], engine)


def _fitting(options: BenchOptions, engine: Any, schemas: list[Any]) -> list[Any]:
    """The schemas whose prompts leave room for a text."""
    found, why = [], ""
    for schema in schemas:
        try:
            request = engine.request(_prompt(schema, engine), **options.of_prompts)
        except ValueError as error:
            why = str(error)
            continue
        if len(request.ids) + options.new_tokens > engine.max_length:
            why = f"with {options.new_tokens} new tokens, its text is longer than {engine.max_length}: lower --max-new-tokens"
            continue
        found.append(schema)
    if not found:
        raise ValueError(f"none of {len(schemas)} schemas can be asked: {why}")
    if len(found) < len(schemas):
        note(f"left out {len(schemas) - len(found)} of {len(schemas)} schemas: {why}")
    return found


def _texts(options: BenchOptions, engines: dict[str, Any], made: list[Made]) -> dict[str, Any]:
    """Texts of all contestants, and what they show."""
    written, contestants = _contestants(options, engines, made)
    laps: list[list[list[Written]]] = [[] for _ in contestants]
    rights: list[list[list[bool]]] = [[] for _ in contestants]
    batches = -(-len(written) // options.batch_size)
    limit = options.text_limit or suite.TEXT_LIMIT
    checks = [suite.validator(one.schema) for one in written]
    right = lambda lap: [check(one.text) and one.seconds <= limit for check, one in zip(checks, lap, strict=True)]
    with progress(options.repeats * batches * len(contestants)) as advance:
        for _ in range(options.repeats):
            for own, found, told in zip(contestants, laps, rights, strict=True):
                found.append(own.lap(options.batch_size, lambda own=own: advance(own.decoder)))
                told.append(right(found[-1]))
                note(own.said(found[-1], told[-1]))  # minutes of work, which the end of a run should not take with it
    valid = [told[0] for told in rights]
    rows = _rows(contestants, laps, valid, written)
    first = next(i for i, own in enumerate(contestants) if own.constrained)
    good = {id(one) for one, right in zip(written, valid[first], strict=True) if right}
    return {"datasets": suite.by_dataset(made, [id(one) in good for one in made]), "rows": rows}


def _contestants(
    options: BenchOptions, engines: dict[str, Any], made: list[Made]
) -> tuple[list[Made], list[Contestant]]:
    """The schemas that every engine can write a text for, and every engine with its requests; with `--compare` also free."""
    plain, heard = next(iter(engines.values())), Compilations()
    written, bound, why = [], [], ""
    for one in made:
        if one.declared:
            try:
                bound.append([_request(options, engine, one, True) for engine in engines.values()])
                written.append(one)
            except ValueError as error:
                why = str(error)
    with bad_input():
        if not written:
            raise ValueError(f"no text can be written for any of {len(made)} schemas: {why or made[0].why}")
    if declared := sum(one.declared for one in made) - len(written):
        note(f"no text can be written for {declared} schemas: {why}")
    contestants = []
    for number, (name, engine) in enumerate(engines.items()):
        sets = {True: [own[number] for own in bound]}
        if options.compare:
            sets = {False: [_request(options, engine, one, False) for one in written]} | sets
        for constrained, requests in sets.items():
            contestants.append(Contestant(name, constrained, engine, requests, 0, heard))
    longest = max(own.engine.capacity(own.requests) for own in contestants)
    longest = min(longest, plain.max_length + max(engine.decoder.slack for engine in engines.values()))
    return written, [dataclasses.replace(own, capacity=longest) for own in contestants]


def _request(options: BenchOptions, engine: Any, one: Made, constrained: bool) -> Any:
    more = {"constraint": one.constraint} if constrained else {}
    return engine.request(_prompt(one.schema, engine), **options.of_prompts, **more)


def _rows(
    contestants: Sequence[Contestant],
    laps: Sequence[Sequence[list[Written]]],
    valid: Sequence[Sequence[bool]],
    written: Sequence[Made],
) -> list[dict[str, Any]]:
    speed = [statistics.median(map(_speed, found)) for found in laps]
    free = {own.decoder: rate for own, rate in zip(contestants, speed, strict=True) if not own.constrained}
    plain: dict[bool, list[list[int]]] = {}
    rows = []
    for own, found, right, rate in zip(contestants, laps, valid, speed, strict=True):
        tokens = [one.tokens for one in found[0]]
        count = sum(map(len, tokens))
        tables = [one.constraint for one in written if isinstance(one.constraint, Table)]
        told = own.constrained and len(tables) == len(written)
        forced = sum(table.forced(text) for table, text in zip(tables, tokens, strict=True)) if told else None
        rows.append(
            {
                "decoder": own.decoder,
                "constrained": own.constrained,
                "texts": len(tokens),
                "valid": sum(right),
                "tokens": count,
                "tokens_per_step": round(count / max(sum(one.steps for one in found[0]), 1), 4),
                "tokens_per_second": round(rate, 2),
                "seconds_per_token": round(statistics.median(map(_per_token, found)), 6),
                "over_free": round(rate / free[own.decoder], 4) if own.constrained and own.decoder in free else None,
                "forced": forced,
                "identical_texts": sum(
                    a == b for a, b in zip(tokens, plain.setdefault(own.constrained, tokens), strict=True)
                ),
            }
        )
    return rows


def _speed(texts: Sequence[Written]) -> float:
    return sum(len(one.tokens) for one in texts) / sum(one.seconds for one in texts)


def _per_token(texts: Sequence[Written]) -> float:
    """The median over texts of a step's seconds per token, without prefill."""
    return statistics.median(one.decode_seconds / max(len(one.tokens), 1) for one in texts)


def _engines(engines: dict[str, Any]) -> Any:
    """A table with a column for each engine."""
    from rich.table import Table as Shown

    part = lambda value: "" if value is None else f"{value:.1%}"
    micro = lambda value: "" if value is None else f"{value * 1e6:.0f} µs"
    milli = lambda own, name: f"{own['compile_seconds'][name] * 1e3:.1f} ms" if own["compile_seconds"] else ""
    table = Shown(title="engines alone", title_justify="left")
    table.add_column("")
    for name in engines:
        table.add_column(name, justify="right")
    lines = {
        "declared": lambda own: part(own["declared"]),
        "true": lambda own: part(own["true"]),
        "wrong": lambda own: str(own["wrong"]),
        "missed": lambda own: str(own["missed"]),
        "first mask, median": lambda own: milli(own, "median"),
        "first mask, p95": lambda own: milli(own, "p95"),
        "mask and advance, median": lambda own: micro(own["token_seconds"]),
        "schemas timed": lambda own: str(own["timed"]),
    }
    for line, shown in lines.items():
        table.add_row(line, *(shown(own) for own in engines.values()))
    return table


def _tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table as Shown

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    part = lambda value: "" if value is None else f"{value:.1%}"
    table = Shown(title=report["about"], title_justify="left")
    for name in ("dataset", "schemas", "declared", "empirical", "compliance", "true", "wrong", "missed"):
        table.add_column(name, justify="left" if name == "dataset" else "right", no_wrap=name == "dataset")
    for name, own in report["datasets"].items():
        shares = (part(own.get(key)) for key in ("declared", "empirical", "compliance", "true"))
        table.add_row(name, str(own["schemas"]), *shares, str(own["wrong"]), str(own["missed"]))
    console.print(table)
    if times := report["compile_seconds"]:
        console.print("to the first mask: " + ", ".join(f"{name} {own * 1e3:.0f} ms" for name, own in times.items()))
    if report["refused"]:
        console.print("refused: " + ", ".join(f"{name} {count}" for name, count in report["refused"].items()))
    if "alone" in report:
        console.print(_engines(report["alone"]))
        for name, own in report["alone"].items():
            said = ", ".join(f"{why} {count}" for why, count in own["refused"].items())
            console.print(f"refused by {name}: {said}", soft_wrap=True)
    if not report["rows"]:
        return
    table = Shown(title="texts", title_justify="left")
    names = ("decoder", "text", "valid", "tokens/step", "tokens/s", "ms/token", "over free", "forced", "same texts")
    for name in names:
        table.add_column(name, justify="left" if name == "decoder" else "right", no_wrap=name == "decoder")
    for row in report["rows"]:
        table.add_row(
            row["decoder"],
            "constrained" if row["constrained"] else "free",
            f"{row['valid']} of {row['texts']}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['seconds_per_token'] * 1e3:.2f}",
            "" if row["over_free"] is None else f"{row['over_free']:.2f}",
            "" if row["forced"] is None else f"{row['forced']} of {row['tokens']}",
            f"{row['identical_texts']} of {row['texts']}",
        )
    console.print(table)
