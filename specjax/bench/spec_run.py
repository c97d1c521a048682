"""`specjax bench spec`: Spec-Bench's protocol for any model, decoder, batch size and mesh."""

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.bench import spec
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.run import progress
from specjax.bench.spec import Answer, Question, Turn
from specjax.jobs import jsonl
from specjax.serve.sampling import check_options
from specjax.terminal import bad_input, note, write

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts XLA's compilations in this process from now on."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **about: Any) -> None:
        self.count += event == _COMPILED


@dataclasses.dataclass
class Contestant:
    """An engine that answers turn by turn.

    Attributes:
      engine: a `specjax.serve.engine.Engine`.
      options: the options of every turn.
      batch_size: rows decoded together.
      capacity: text buffer slots, the same for all turns.
      compilations: the process's.
      compile_seconds: compile time within turns; such turns were decoded again.
    """

    engine: Any
    options: dict[str, Any]
    batch_size: int
    capacity: int
    compilations: Compilations
    compile_seconds: float = 0.0

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers questions that are decoded together, turn by turn."""
        said: list[list[dict[str, str]]] = [[] for _ in questions]
        turns: list[list[Turn]] = [[] for _ in questions]
        for number in range(max(len(question.turns) for question in questions)):
            asked, requests = [], []
            for i, question in enumerate(questions):
                if number < len(question.turns) and len(turns[i]) == number:
                    messages = [*said[i], {"role": "user", "content": question.turns[number]}]
                    try:
                        requests.append(self.engine.request(as_prompt(messages, self.engine), **self.options))
                    except ValueError:  # the answer so far leaves no room
                        continue
                    asked.append((i, messages))
            if requests:
                records, seconds = self._timed(requests)
                for (i, messages), record in zip(asked, records, strict=True):
                    text = record.text or ""
                    share = seconds / len(requests)
                    turns[i].append(Turn(text, record.steps, record.new_tokens, share, tuple(record.accepted)))
                    said[i] = [*messages, {"role": "assistant", "content": text}]
        return [Answer(question, tuple(own)) for question, own in zip(questions, turns, strict=True)]

    def _timed(self, requests: list[Any]) -> tuple[list[Any], float]:
        before = self.compilations.count
        records, seconds = self._run(requests)
        if self.compilations.count > before:
            records, again = self._run(requests)
            self.compile_seconds += max(seconds - again, 0.0)
            seconds = again
        return records, seconds

    def _run(self, requests: list[Any]) -> tuple[list[Any], float]:
        began = time.perf_counter()
        records = list(self.engine.run(requests, batch_size=self.batch_size, capacity=self.capacity))
        return records, time.perf_counter() - began


def as_prompt(messages: list[dict[str, str]], engine: Any) -> Any:
    """Messages for a model with a chat template; otherwise only the texts, one line per turn."""
    if getattr(engine.model.tokenizer, "chat_template", None):
        return messages
    return "\n".join(message["content"] for message in messages) + "\n"


def command(options: BenchOptions) -> int:
    """Runs the suite; returns the exit status."""
    with bad_input():
        if options.input is None:
            raise ValueError("bench spec needs Spec-Bench's questions: give --input question.jsonl")
        check_options(options.of_prompts)
        questions = spec.read(options.input, options.samples)
        folder = _folder(options.answers)
        engines, skipped = engines_of(options)
        contestants, questions = _contestants(options, engines, questions)
    for reason in skipped:
        note(reason)
    rounds: dict[str, list[list[Answer]]] = {name: [] for name in contestants}
    parts = _parts(questions, options.batch_size)
    with progress(options.repeats * len(parts) * len(contestants)) as advance:
        for _ in range(options.repeats):
            lap: dict[str, list[Answer]] = {name: [] for name in contestants}
            for part in parts:
                for name, contestant in contestants.items():
                    lap[name] += contestant.answer(part)
                    advance(name)
            for name, answers in lap.items():
                rounds[name].append(answers)
    rows = _rows(contestants, rounds)
    plain = next(iter(contestants.values()))
    about = f"Spec-Bench, {plain.engine.model.name}, {len(questions)} questions, at most {options.new_tokens} tokens a turn, "
    about += f"batch {options.batch_size}, mean of {options.repeats}"
    if folder is not None:
        for name, laps in rounds.items():
            file = folder / f"{re.sub('[^A-Za-z0-9._=-]+', '-', name)}.jsonl"
            file.write_text("".join(line + "\n" for line in spec.answer_lines(laps[0], name, time.time)))
    if options.json:
        write(jsonl.dumps({"about": about, "rows": rows}) + "\n")
    else:
        _table(rows, about)
    return 0


def _folder(answers: str | None) -> Path | None:
    if answers is None:
        return None
    folder = Path(answers)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--answers {answers} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _contestants(
    options: BenchOptions, engines: dict[str, Any], questions: list[Question]
) -> tuple[dict[str, Contestant], list[Question]]:
    """The contestants, and the questions whose first turn leaves room for an answer."""
    plain = next(iter(engines.values()))
    if plain.model.tokenizer is None:
        raise ValueError(f"{plain.model.name} has no tokenizer, and questions are texts")
    fitting, needed, why = [], 0, ""
    for question in questions:
        try:
            first = plain.request(
                as_prompt([{"role": "user", "content": question.turns[0]}], plain), **options.of_prompts
            )
        except ValueError as error:
            why = str(error)
            continue
        fitting.append(question)
        rest = sum(len(plain.encode(turn)) + options.new_tokens + 32 for turn in question.turns[1:])
        needed = max(needed, len(first.ids) + options.new_tokens + rest)
    if not fitting:
        raise ValueError(f"none of {len(questions)} questions can be asked: {why}")
    if len(fitting) < len(questions):
        note(f"left out {len(questions) - len(fitting)} of {len(questions)} questions: {why}")
    heard = Compilations()
    made = {}
    for name, engine in engines.items():
        capacity = -(-(min(needed, engine.max_length) + engine.decoder.slack) // 128) * 128
        made[name] = Contestant(engine, options.of_prompts, options.batch_size, capacity, heard)
    return made, fitting


def _parts(questions: list[Question], size: int) -> list[list[Question]]:
    """Groups of questions that are decoded together, each of one task."""
    parts = []
    for task in spec.TASKS:
        own = [question for question in questions if question.task == task]
        parts += [own[i : i + size] for i in range(0, len(own), size)]
    return parts


def _rows(contestants: dict[str, Contestant], rounds: dict[str, list[list[Answer]]]) -> list[dict[str, Any]]:
    plain = next(iter(rounds.values()))
    rows = []
    for name, laps in rounds.items():
        measures = spec.measure(laps, plain)
        rows.append(
            {
                "decoder": name,
                "overall": dataclasses.asdict(measures.pop("overall")),
                "tasks": {task: dataclasses.asdict(own) for task, own in measures.items()},
                "deviation": spec.deviation(laps),
                "compile_seconds": round(contestants[name].compile_seconds, 2),
                "identical_texts": min(spec.same_texts(lap, plain[0]) for lap in laps),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    tasks = [task for task in spec.TASKS if task in rows[0]["tasks"]]
    table = Table(title=f"{title}; speed-ups over plain decoding", title_justify="left")
    names = ("decoder", *tasks, "overall", "accepted", "tokens/s", "compiling", "same texts")
    for name in names:
        table.add_column(name, justify="left" if name == "decoder" else "right", no_wrap=name == "decoder")
    for row in rows:
        overall = row["overall"]
        table.add_row(
            row["decoder"],
            *(f"{row['tasks'][task]['speedup']:.2f}" for task in tasks),
            f"{overall['speedup']:.2f}",
            f"{overall['mean_accepted']:.2f}",
            f"{overall['tokens_per_second']:.1f} ± {row['deviation']:.1f}",
            f"{row['compile_seconds']:.0f} s",
            f"{row['identical_texts']} of {overall['questions']}",
        )
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    console.print(table)
