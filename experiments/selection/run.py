"""One of several answers of `tiny` to arithmetic questions, against its greedy answer: `python experiments/selection/run.py`.

All selections choose among the same completions, of N the first N. Passes are those of rows: what a completion has tokens, and
for `first_finish` no more of each than the winner has, as `check` sees on a few questions that are decoded that way. Writes
`temperature_T.json` beside this file.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path

import numpy as np

import specjax
from specjax import models, tasks
from specjax.assembly.registry import make_selection
from specjax.evaluate.statistics import auroc, paired, wilson
from specjax.search import Candidate, FirstFinish
from specjax.search.selection import answer_of
from specjax.serve.engine import Engine
from specjax.serve.request import several
from specjax.serve.slots import in_order

ANSWER = r"answer is ([0-9]+)"
SCORED = "reward:module=equations.right"
LINES = ("majority", "self_certainty", "borda", "first_finish", SCORED, f"{SCORED},vote=sum")
COUNTS = (2, 4, 8)


def main() -> None:
    """Draws, chooses and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--check", type=int, default=8, help="questions that are decoded by first-finish search too")
    options = parser.parse_args()
    model, family = models.load("tiny", dtype="float32"), tasks.FAMILIES["math"]
    questions = tasks.generate("math", options.level, seed=options.seed, count=options.limit)
    prompts = [{"messages": tasks.messages(q), "id": f"math-{i}"} for i, q in enumerate(questions)]
    asked = {"max_new_tokens": 128, "batch_size": 16, "progress": False, "seed": options.seed, "drafter": "none"}

    def right(question, record):
        return record.error is None and family.check(question, record.text or "")

    greedy = specjax.generate(model, prompts, logprobs=True, **asked)
    began = time.perf_counter()
    drawn = specjax.generate(
        model,
        prompts,
        temperature=options.temperature,
        num_return_sequences=max(COUNTS),
        logprobs=True,
        **asked,
    )
    seconds = time.perf_counter() - began
    groups = [drawn[at : at + max(COUNTS)] for at in range(0, len(drawn), max(COUNTS))]
    base = np.asarray([right(*pair) for pair in zip(questions, greedy, strict=True)], float)
    marks = np.asarray([[right(q, record) for record in own] for q, own in zip(questions, groups, strict=True)], float)

    row = functools.partial(compared, base)
    steps = np.asarray([[record.steps for record in own] for own in groups])
    rows = [
        row("greedy", 1, base, [record.steps for record in greedy]),
        row("one of them", 1, marks.mean(axis=1), steps, max(COUNTS)),
    ]
    for count in COUNTS:
        for line in LINES:
            choose = make_selection(line).choose
            taken = [choose([candidate(record) for record in own[:count]])[0] for own in groups]
            passes = steps[:, :count].sum(axis=1)
            if line == "first_finish":
                ends = [[r.steps for r in own[:count] if r.finish_reason == "eos"] for own in groups]
                passes = [count * min(own, default=128) for own in ends]
            rows.append(row(line, count, marks[np.arange(len(taken)), taken], passes))
        rows.append(row("any of them right", count, marks[:, :count].max(axis=1), steps[:, :count].sum(axis=1)))
    content = {"options": vars(options), "seconds": seconds, "tokens": sum(r.new_tokens for r in drawn), "rows": rows}
    content["uncertainty"] = {
        name: dataclasses.asdict(auroc(np.asarray(scores), base == 0))
        for name, scores in (
            ("nll", [record.nll for record in greedy]),
            ("nll a token", [record.nll / record.new_tokens for record in greedy]),
            ("tokens", [record.new_tokens for record in greedy]),
            ("minus self-certainty", [-record.self_certainty for record in greedy]),
        )
    }
    check(model, prompts[: options.check], groups, options, asked)
    for found in rows:
        print(
            "{name:40} {completions:3} {passes:7.1f} {right:.3f} ({low:.3f} to {high:.3f}) {points:+.3f}".format(
                **found
            )
        )
    for name, found in content["uncertainty"].items():
        print("{0:20} {area:.3f} ({low:.3f} to {high:.3f})".format(name, **found))
    file = Path(__file__).parent / f"temperature_{options.temperature:g}.json"
    file.write_text(
        json.dumps(json.loads(json.dumps(content), parse_float=lambda x: float(f"{float(x):.4g}")), indent=1) + "\n"
    )


def compared(base, name, count, shares, passes, samples=1):
    """A row of the table: what is right, by question, beside the greedy answers `base`."""
    low, high = wilson(shares, samples)
    found = paired(base, shares)
    return {
        "name": name,
        "completions": count,
        "passes": float(np.mean(passes)),
        "right": float(shares.mean()),
        "low": low,
        "high": high,
        "points": found.difference,
        "points_low": found.low,
        "points_high": found.high,
        "p": found.p_value,
    }


def candidate(record):
    """What selections see of a completion."""
    answer = answer_of(record.text or "", ANSWER)
    ended = record.finish_reason == "eos"
    return Candidate(answer, record.self_certainty, record.new_tokens, ended, record.text or "")


def check(model, prompts, groups, options, asked):
    """First-finish search itself takes what is taken of full completions here, in the passes that are counted."""
    engine, count = Engine(model, drafter="none"), max(COUNTS)
    own = {"temperature": options.temperature, "max_new_tokens": asked["max_new_tokens"], "seed": options.seed}
    for prompt, full in zip(prompts, groups, strict=False):
        requests = several(engine.request(prompt["messages"], id=prompt["id"], **own), count)
        records = list(in_order(engine.turns(requests, slots=count, race=True)))
        ends = [record.steps for record in full if record.finish_reason == "eos"]
        assert sum(record.steps for record in records) == count * min(ends, default=128)
        at = FirstFinish().choose([candidate(record) for record in full])[0]
        assert FirstFinish().choose([candidate(record) for record in records])[0] == at
        assert records[at].tokens == full[at].tokens


if __name__ == "__main__":
    main()
