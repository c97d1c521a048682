"""`specjax bench spec`: Spec-Bench's protocol for any model, decoder, batch size and mesh."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.bench import spec
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.peers import PEERS, peers_of
from specjax.bench.run import Peer, progress
from specjax.bench.spec import Answer, Question, Turn
from specjax.jobs import jsonl
from specjax.serve.sampling import check_options
from specjax.serve.watch import text_of
from specjax.terminal import bad_input, note, write

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts XLA's compilations in this process from now on."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **about: Any) -> None:
        self.count += event == _COMPILED


@dataclasses.dataclass(frozen=True)
class Written:
    """What a peer wrote after one prompt, with the fields of our own records that a turn has."""

    text: str
    new_tokens: int
    steps: int = 0
    accepted: tuple[int, ...] = ()


@dataclasses.dataclass
class Contestant:
    """A decoder or a peer that answers turn by turn.

    Attributes:
      engine: a `specjax.serve.engine.Engine`, which reads the turns.
      options: the options of every turn.
      complete: decodes requests together; returns a record for each.
      compilations: the process's.
      compile_seconds: compile time within turns; such turns were decoded again.
    """

    engine: Any
    options: dict[str, Any]
    complete: Callable[[list[Any]], Sequence[Any]]
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

    def _timed(self, requests: list[Any]) -> tuple[Sequence[Any], float]:
        before = self.compilations.count
        records, seconds = self._run(requests)
        if self.compilations.count > before:
            records, again = self._run(requests)
            self.compile_seconds += max(seconds - again, 0.0)
            seconds = again
        return records, seconds

    def _run(self, requests: list[Any]) -> tuple[Sequence[Any], float]:
        began = time.perf_counter()
        records = self.complete(requests)
        return records, time.perf_counter() - began


def ours(engine: Any, options: BenchOptions, capacity: int) -> Callable[[list[Any]], list[Any]]:
    """How an engine completes requests, in a text buffer of `capacity` slots for all turns."""
    return lambda requests: list(engine.run(requests, batch_size=options.batch_size, capacity=capacity))


def theirs(engine: Any, peer: Peer) -> Callable[[list[Any]], list[Written]]:
    """How a peer completes requests that `engine` made, and whose text it decodes."""

    def complete(requests: list[Any]) -> list[Written]:
        rows = zip(requests, peer.complete(requests), strict=True)
        return [Written(text_of(engine.model.tokenizer, request, ids) or "", len(ids)) for request, ids in rows]

    return complete


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
        named = peers_of(options)
        questions = spec.read(options.input, options.samples)
        folder = _folder(options.answers)
        engines, skipped = engines_of(options)
        contestants, questions = _contestants(options, engines, questions, named)
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
    rows = _rows(contestants, rounds, bool(options.temperature))
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
    options: BenchOptions, engines: dict[str, Any], questions: list[Question], peers: Sequence[str]
) -> tuple[dict[str, Contestant], list[Question]]:
    """The contestants, peers last, and the questions whose first turn leaves room for an answer."""
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
        made[name] = Contestant(engine, options.of_prompts, ours(engine, options, capacity), heard)
    short = plain.request(as_prompt([{"role": "user", "content": "Hello"}], plain), max_new_tokens=4)
    for name in peers:
        for mode, peer in PEERS[name](options, engines, min(needed, plain.max_length)).items():
            peer.complete([short] * options.batch_size)  # its first call is slow
            made[f"{name} {mode}"] = Contestant(plain, options.of_prompts, theirs(plain, peer), heard)
    return made, fitting


def _parts(questions: list[Question], size: int) -> list[list[Question]]:
    """Groups of questions that are decoded together, each of one task."""
    parts = []
    for task in spec.TASKS:
        own = [question for question in questions if question.task == task]
        parts += [own[i : i + size] for i in range(0, len(own), size)]
    return parts


def _rows(
    contestants: dict[str, Contestant], rounds: dict[str, list[list[Answer]]], drawn: bool
) -> list[dict[str, Any]]:
    """The rows of the table. The texts of peers are not compared where they draw other random numbers."""
    plain = next(iter(rounds.values()))
    rows = []
    for name, laps in rounds.items():
        measures = spec.measure(laps, plain)
        foreign = drawn and not laps[0][0].turns[0].steps
        rows.append(
            {
                "decoder": name,
                "overall": dataclasses.asdict(measures.pop("overall")),
                "tasks": {task: dataclasses.asdict(own) for task, own in measures.items()},
                "deviation": spec.deviation(laps),
                "compile_seconds": round(contestants[name].compile_seconds, 2),
                "identical_texts": None if foreign else min(spec.same_texts(lap, plain[0]) for lap in laps),
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
            "" if overall["mean_accepted"] is None else f"{overall['mean_accepted']:.2f}",
            f"{overall['tokens_per_second']:.1f} ± {row['deviation']:.1f}",
            f"{row['compile_seconds']:.0f} s",
            "" if row["identical_texts"] is None else f"{row['identical_texts']} of {overall['questions']}",
        )
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 200
    console.print(table)
