"""`specjax bench parallel`: a model's scores on ParallelBench's tasks when it decodes in parallel, and other models' beside."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import models
from specjax.assembly.line import lines as lines_of
from specjax.assembly.line import read_line
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.parallel import TASKS, Question, Task, tools_of
from specjax.bench.run import progress
from specjax.decode.lines import read_decode
from specjax.evaluate.statistics import wilson
from specjax.jobs import jsonl
from specjax.serve.engine import Engine
from specjax.sharding import make_mesh
from specjax.terminal import bad_input, note, write


@dataclasses.dataclass(frozen=True)
class Asked:
    """A task as it was asked for, with its questions."""

    task: Task
    questions: list[Question]


def command(options: BenchOptions) -> int:
    """Runs the tasks; returns the exit status."""
    with bad_input():
        chosen, tools, notes = chosen_of(options)
        engines, skipped = engines_of(options, baseline=False)
        engines |= {name: beside(options, name) for name in dict.fromkeys(options.beside)}
        requests = {name: _requests(options, engine, chosen) for name, engine in engines.items()}
    for reason in (*notes, *skipped):
        note(reason)
    rows = []
    with progress(len(engines) * len(chosen)) as advance:
        for name, engine in engines.items():
            texts, tokens, steps = {}, 0, 0
            for line in chosen:
                records = list(engine.run(requests[name][line], batch_size=options.batch_size))
                texts[line] = [record.text or "" for record in records]
                tokens, steps = tokens + sum(r.new_tokens for r in records), steps + sum(r.steps for r in records)
                advance(name)
            measured = {line: measure(chosen[line], texts[line], tools) for line in chosen}
            figures = {key: {line: one[key] for line, one in measured.items()} for key in FIGURES}
            rows.append(
                {"decoder": name, "model": engine.model.name, "tokens_per_pass": round(tokens / steps, 3), **figures}
            )
    if options.json:
        write(jsonl.dumps({"rows": rows}) + "\n")
    else:
        _table(rows, list(chosen), options.samples)
    return 0


def chosen_of(options: BenchOptions) -> tuple[dict[str, Asked], dict[str, Any], list[str]]:
    """The tasks by their lines, the measures that are here, and notes on what is not measured.

    Raises:
      ValueError: on an unknown task or size, or if a named task has nothing that can be measured.
    """
    chosen: dict[str, Asked] = {}
    for text in lines_of([options.tasks]) if options.tasks else TASKS:
        line = read_line(text, "task")
        if line.name not in TASKS:
            raise ValueError(f"unknown task {line.name!r}; choose {', '.join(TASKS)}")
        size = line.fields.get("n")
        if {*line.fields} - {"n"} or not (size is None or size.isdecimal()):
            raise ValueError(f"task {text!r}: its only setting is n, a whole number, as in copy:n=15")
        task = TASKS[line.name]
        chosen[text] = Asked(task, task.questions(options.samples, None if size is None else int(size)))
    tools, missing = tools_of(name for asked in chosen.values() for name in asked.task.measured)
    notes = [
        f"no score for {', '.join(t for t, a in chosen.items() if name in a.task.measured)}: {why}"
        for name, why in missing.items()
    ]
    empty = [text for text, a in chosen.items() if not a.task.factors(a.questions[0], a.questions[0].answer, tools)]
    if options.tasks and empty:
        raise ValueError(f"nothing of {empty[0]} can be measured: {next(iter(missing.values()))}")
    kept = {text: asked for text, asked in chosen.items() if text not in empty}
    return kept, tools, notes + [f"left out {text}: nothing of it can be measured" for text in empty]


def beside(options: BenchOptions, name: str) -> Engine:
    """Plain decoding by another model, which is loaded as it is stored.

    Raises:
      ValueError: if it is a diffusion model.
    """
    model = models.load(name, options.dtype, make_mesh(options.mesh))
    if model.masked or model.canvas:
        raise ValueError(
            f"--beside takes autoregressive models, and {model.name} is a diffusion model: give it as --model"
        )
    return Engine(model, read_decode("none"), mesh=options.mesh)


FIGURES = ("accuracy", "interval", "strict", "factors")


def measure(asked: Asked, texts: list[str], tools: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a task's texts.

    Returns:
      `accuracy`, the mean score, and `interval`, its 95% interval, both None if a factor cannot be measured; `strict`,
      the share that is also written exactly as asked, None for tasks without such a form; `factors`, their means.
    """
    pairs = list(zip(asked.questions, texts, strict=True))
    factors = [asked.task.factors(question, text, tools) for question, text in pairs]
    names = dict.fromkeys(name for one in factors for name in one)
    scores = [asked.task.score(question, text, tools) for question, text in pairs]
    strict = [asked.task.strict(question, text) for question, text in pairs]
    known = None not in scores
    return {
        "accuracy": _mean(scores) if known else None,
        "interval": [round(end, 4) for end in wilson(np.array(scores, float))] if known else None,
        "strict": None if None in strict else _mean(strict),
        "factors": {name: _mean([one.get(name, 0.0) for one in factors]) for name in names},
    }


def _mean(values: list[Any]) -> float:
    return round(sum(values) / len(values), 4)


def _requests(options: BenchOptions, engine: Any, chosen: dict[str, Asked]) -> dict[str, list[Any]]:
    """The requests of every task.

    Raises:
      ValueError: if a right answer does not fit into the new tokens.
    """
    tokenizer = engine.model.tokenizer
    for line, asked in chosen.items():
        right = max(len(tokenizer.encode(q.answer, add_special_tokens=False)) for q in asked.questions)
        if right >= options.new_tokens:
            raise ValueError(
                f"a right answer of {line} has {right} tokens, and the model may write {options.new_tokens}: give "
                f"--max-new-tokens {right + 1} or more"
            )
    return {
        line: [
            engine.request(q.messages, id=f"{line} {i}", **options.of_prompts) for i, q in enumerate(asked.questions)
        ]
        for line, asked in chosen.items()
    }


def _table(rows: list[dict[str, Any]], lines: list[str], samples: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{rows[0]['model']}, {samples} questions per task, scores in % (95%)", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["decoder"], justify="right")
    table.add_row("tokens/pass", *(f"{row['tokens_per_pass']:.2f}" for row in rows))
    for line in lines:
        table.add_row(line, *(_cell(row["accuracy"][line], row["interval"][line]) for row in rows))
        factors = dict.fromkeys(name for row in rows for name in row["factors"][line])
        for name in factors if len(factors) > 1 or rows[0]["accuracy"][line] is None else ():
            table.add_row(f"  {name}", *(f"{100 * row['factors'][line].get(name, 0.0):.0f}" for row in rows))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    console.print(table)


def _cell(score: float | None, interval: list[float] | None) -> str:
    if score is None or interval is None:
        return "-"
    return f"{100 * score:.0f} ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})"
