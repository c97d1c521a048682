"""`specjax bench parallel`: how many of ParallelBench's list tasks a model still gets right when it decodes in parallel."""

import argparse
import sys
from typing import Any

from specjax.bench.parallel import TASKS, right, samples
from specjax.jobs import jsonl


def command(args: argparse.Namespace) -> int:
    """Runs the tasks for parsed options; returns the exit status."""
    from specjax.bench.run import engines_of, progress
    from specjax.terminal import bad_input, note

    with bad_input():
        chosen = args.tasks.split(",") if args.tasks else list(TASKS)
        questions = {task: samples(task, args.samples) for task in chosen}
        engines, skipped = engines_of(args, baseline=False)
        requests = {name: _requests(args, engine, questions) for name, engine in engines.items()}
    for reason in skipped:
        note(reason)
    rows = []
    with progress(len(engines) * len(chosen)) as advance:
        for name, engine in engines.items():
            accuracy, tokens, steps = {}, 0, 0
            for task in chosen:
                records = list(engine.run(requests[name][task], batch_size=args.batch_size))
                scores = [right(q, r.text or "") for q, r in zip(questions[task], records, strict=True)]
                accuracy[task] = round(sum(scores) / len(scores), 4)
                tokens, steps = tokens + sum(r.new_tokens for r in records), steps + sum(r.steps for r in records)
                advance(name)
            rows.append({"decoder": name, "tokens_per_pass": round(tokens / steps, 3), "accuracy": accuracy})
    if args.json:
        sys.stdout.write(jsonl.dumps({"rows": rows}) + "\n")
    else:
        _table(rows, chosen, f"{next(iter(engines.values())).model.name}, {args.samples} questions a task")
    return 0


def _requests(args: argparse.Namespace, engine: Any, questions: dict[str, list[Any]]) -> dict[str, list[Any]]:
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    return {
        task: [engine.request(q.messages, id=f"{task} {i}", **options) for i, q in enumerate(own)]
        for task, own in questions.items()
    }


def _table(rows: list[dict[str, Any]], tasks: list[str], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("decoder", "tokens/pass", *tasks):
        table.add_column(name, justify="left" if name == "decoder" else "right")
    for row in rows:
        table.add_row(row["decoder"], f"{row['tokens_per_pass']:.2f}", *(f"{row['accuracy'][t]:.2f}" for t in tasks))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width to fit
        console.width = 200
    console.print(table)
