"""`specjax bench parallel`: a model's accuracy on ParallelBench's list tasks when it decodes in parallel."""

from typing import Any

from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.parallel import TASKS, right, samples
from specjax.bench.run import progress
from specjax.jobs import jsonl
from specjax.terminal import bad_input, note, write


def command(options: BenchOptions) -> int:
    """Runs the tasks; returns the exit status."""
    with bad_input():
        chosen = options.tasks.split(",") if options.tasks else list(TASKS)
        questions = {task: samples(task, options.samples) for task in chosen}
        engines, skipped = engines_of(options, baseline=False)
        requests = {name: _requests(options, engine, questions) for name, engine in engines.items()}
    for reason in skipped:
        note(reason)
    rows = []
    with progress(len(engines) * len(chosen)) as advance:
        for name, engine in engines.items():
            accuracy, tokens, steps = {}, 0, 0
            for task in chosen:
                records = list(engine.run(requests[name][task], batch_size=options.batch_size))
                scores = [right(q, r.text or "") for q, r in zip(questions[task], records, strict=True)]
                accuracy[task] = round(sum(scores) / len(scores), 4)
                tokens, steps = tokens + sum(r.new_tokens for r in records), steps + sum(r.steps for r in records)
                advance(name)
            rows.append({"decoder": name, "tokens_per_pass": round(tokens / steps, 3), "accuracy": accuracy})
    if options.json:
        write(jsonl.dumps({"rows": rows}) + "\n")
    else:
        _table(rows, chosen, f"{next(iter(engines.values())).model.name}, {options.samples} questions per task")
    return 0


def _requests(options: BenchOptions, engine: Any, questions: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        task: [engine.request(q.messages, id=f"{task} {i}", **options.of_prompts) for i, q in enumerate(own)]
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
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    console.print(table)
