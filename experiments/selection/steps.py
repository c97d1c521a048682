"""Methods that go step by step, on the questions of `run.py`, against `tiny`'s greedy answer.

`python experiments/selection/steps.py`. A row's passes are those of `tiny` over rows of a question, and `small_passes` those of
`tiny-draft`: a token each, and a block of tokens that is read each. Whatever a method throws away counts; the reading of the
question does not. Rows go into `steps.json` as they come, and those that are there are not measured again. Rows of `LATER` are
about the first questions only, and are compared with what greedy decoding makes of these.
"""

import argparse
import json
import re
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import specjax
from specjax import decoder as decoding
from specjax import models, tasks
from specjax.decode import Hedged
from specjax.evaluate.statistics import paired, wilson
from specjax.models.text import encoded
from specjax.search import (
    AStar,
    EntropyAdaptive,
    EntropyAdaptiveDecoder,
    SelfAgreement,
    SpecReason,
    Superposed,
    Written,
    steps_ahead,
)

FILE = Path(__file__).parent / "steps.json"
ANSWER = re.compile(r"answer is ([0-9]+)")
NEW = 128
LARGE, SMALL = (models.load(name, dtype="float32") for name in ("tiny", "tiny-draft"))


def astar(temperature, ahead, cost="nll"):
    """A* with four samples a step."""
    method = AStar(4, budget=64, width=32, cost=cost, heuristic=steps_ahead(ahead) if ahead else None, separator=".")
    return lambda prompts, seed: method(LARGE, prompts, temperature=temperature, seed=seed, batch_size=10)


def superposed(drafts):
    """Superposed decoding."""

    def run(prompts, seed):
        how = {"max_new_tokens": NEW, "batch_size": 20, "progress": False}
        for record in specjax.generate(LARGE, prompts, decode=Superposed(drafts), **how):
            yield Written(record.prompt, record.text, record.tokens, record.finish_reason, record.steps)

    return run


def pooled(method):
    """One of a pool at temperature 0.7."""
    how = {"temperature": 0.7, "max_new_tokens": NEW, "batch_size": 10}
    return lambda prompts, seed: method(LARGE, prompts, seed=seed, **how)


def reasoned(score, threshold):
    """SpecReason, greedy."""
    method = SpecReason(SMALL, threshold, score, separator=".")
    how = {"temperature": 0.0, "max_new_tokens": NEW, "batch_size": 25}
    return lambda prompts, seed: method(LARGE, prompts, seed=seed, **how)


def agreed(samples, temperature, **fields):
    """Self-agreement."""
    method = SelfAgreement(samples, **fields)
    return lambda prompts, seed: method(LARGE, prompts, temperature=temperature, seed=seed, batch_size=5)


def alone(model):
    """Greedy decoding."""

    def run(prompts, seed):
        for record in specjax.generate(
            model, prompts, drafter="none", max_new_tokens=NEW, batch_size=25, progress=False
        ):
            passes = (record.steps, 0) if model is LARGE else (0, record.steps)
            yield Written(record.prompt, record.text, record.tokens, record.finish_reason, *passes)

    return run


def turns(threshold):
    """Entropy-adaptive decoding, greedy."""

    def run(prompts, seed):
        decoder = EntropyAdaptiveDecoder(LARGE.lm, SMALL.lm, EntropyAdaptive(threshold=threshold), greedy=True)
        params = {"target": LARGE.params, "small": SMALL.params}
        for at in range(0, len(prompts), 25):
            ids = [encoded(LARGE, prompt) for prompt in prompts[at : at + 25]]
            given = specjax.Prompts.of(ids, NEW, seed=seed, eos=LARGE.eos_ids)
            state = decoder.init(params, given, capacity=512, cache_dtype=jnp.float32)
            state = decoding.run(decoder, params, state)
            tokens, length = np.asarray(state.tokens), np.asarray(state.length)
            for row, own in enumerate(ids):
                new = tokens[row, len(own) : length[row]].tolist()
                text = LARGE.tokenizer.decode(new, skip_special_tokens=True)
                passes = int(state.large.passes[row]), int(state.small.passes[row])
                reason = "eos" if new[-1] in LARGE.eos_ids else "length"
                yield Written(prompts[at + row], text, new, reason, *passes)

    return run


ROWS = {
    "greedy": alone(LARGE),
    "tiny-draft, greedy": alone(SMALL),
    "astar, temperature 0.3": astar(0.3, 0),
    "spec_reason, digit from 7": reasoned("digit", 7.0),
    "spec_reason, mean digit from 4": reasoned("mean_digit", 4.0),
    "spec_reason, likelihood from 0.8": reasoned("likelihood", 0.8),
    "self_agreement of 4, temperature 0.7": agreed(4, 0.7),
    "self_agreement of 4, temperature 0.7, own words": agreed(4, 0.7, answer=""),
    "entropy_adaptive from 0.3": turns(0.3),
}
LATER = {
    "superposed of 3": (20, superposed(3)),
    "hedged of 4, majority": (40, pooled(Hedged(4, 'majority:answer="answer is ([0-9]+)"'))),
}
"""How many of the questions, and what answers them."""


def main() -> None:
    """Asks, counts and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--only", default="", help="rows whose name begins like this")
    options = parser.parse_args()
    family = tasks.FAMILIES["math"]
    questions = tasks.generate("math", options.level, seed=options.seed, count=options.limit)
    prompts = [tasks.messages(question) for question in questions]
    chosen = {name: getattr(options, name) for name in ("level", "limit", "seed")}
    content = json.loads(FILE.read_text()) if FILE.exists() else {"options": chosen, "rows": []}
    if content["options"] != chosen:
        raise SystemExit(f"{FILE} holds rows of {content['options']}: remove it first")
    there = {row["name"]: row for row in content["rows"]}
    for name, (count, run) in ({name: (len(prompts), run) for name, run in ROWS.items()} | LATER).items():
        if name in there or not name.startswith(options.only):
            continue
        began = time.perf_counter()
        records = list(run(prompts[:count], options.seed))
        asked = questions[:count]
        marks = [float(family.check(*pair)) for pair in zip(asked, [record.text for record in records], strict=True)]
        answers = [
            float(said(record.text) == question.given[-1][3]) for question, record in zip(asked, records, strict=True)
        ]
        base = there["greedy"]["marks"][:count] if name != "greedy" else marks
        there[name] = {
            "name": name,
            "questions": count,
            **counted(records, marks, answers, base),
            "seconds": time.perf_counter() - began,
            "marks": marks,
        }
        content["rows"] = [there[each] for each in (*ROWS, *LATER) if each in there]
        text = json.dumps(json.loads(json.dumps(content), parse_float=lambda x: float(f"{float(x):.4g}")), indent=1)
        FILE.write_text(re.sub(r"\[\s+([01.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
        print({key: value for key, value in there[name].items() if key != "marks"}, flush=True)


def said(text):
    """The number that a text says is the answer; None of none."""
    found = ANSWER.findall(text)
    return int(found[-1]) if found else None


def counted(records, marks, answers, base):
    """What a row says."""
    low, high = wilson(np.asarray(marks), 1)
    against = paired(np.asarray(base), np.asarray(marks))
    steps = [step for record in records for step in record.steps]
    by_small = [step for step in steps if step.by == "small"]
    scores = [step.score for step in steps if step.score is not None]
    return {
        "passes": float(np.mean([record.passes for record in records])),
        "small_passes": float(np.mean([record.small_passes for record in records])),
        "right": float(np.mean(marks)),
        "low": low,
        "high": high,
        "points": against.difference,
        "points_low": against.low,
        "points_high": against.high,
        "p": against.p_value,
        "answers": float(np.mean(answers)),
        "ended": float(np.mean([record.finish_reason == "eos" for record in records])),
        "steps": len(steps) / len(records),
        "small_share": len(by_small) / len(steps) if steps else None,
        "scores": {f"{share}": float(np.quantile(scores, share)) for share in (0.1, 0.5, 0.9)} if scores else None,
    }


if __name__ == "__main__":
    main()
