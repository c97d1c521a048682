"""Steps, speed and quality of unmask and cache policies on the shipped diffusion model. See README.md for the command.

Quality is filling in a missing line of held-out code (exact match of its tokens, paired with the baseline line by line) and the
bits per byte that the shipped autoregressive model finds in completions. Speed is that of the completions.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models
from specjax.bench import stdlib
from specjax.bench.run import progress
from specjax.lm import Block, Wants
from specjax.serve.engine import Engine

HERE = pathlib.Path(__file__).resolve().parent
BASELINE = ("fixed", "none")
CONTESTANTS = (
    BASELINE, ("fixed", "prefix"), ("fixed", "dual"), ("threshold", "prefix"), ("threshold", "dual"),
    ("threshold:threshold=0.7", "dual"), ("factor", "dual"), ("entropy", "dual"), ("local_leap", "dual"),
    ("credit+threshold", "dual"), ("prophet+threshold", "dual"), ("slow_fast", "dual"), ("fixed:steps=8", "dual"),
    ("rcr:steps=8", "dual"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Infill:
    """A line of held-out code with its surroundings, in token ids."""

    before: tuple[int, ...]
    line: tuple[int, ...]
    after: tuple[int, ...]


def infills(tokenizer: Any, count: int, seed: int = 0, before: int = 64, after: int = 32) -> list[Infill]:
    """Lines of 3 to 10 tokens from held-out files, spread evenly over them, the same ones every time."""
    newline = {i for token, i in tokenizer.get_vocab().items() if token.startswith("Ċ")}
    found = []
    for path in stdlib.heldout_files():
        ids = tokenizer(stdlib.read(path))["input_ids"]
        ends = [i for i, token in enumerate(ids) if token in newline]
        for start, end in zip(ends, ends[1:], strict=False):
            if 3 <= end - start - 1 <= 10 and start + 1 >= before and end + after <= len(ids):
                line = ids[start + 1 : end]
                found.append(
                    Infill(tuple(ids[start + 1 - before : start + 1]), tuple(line), tuple(ids[end : end + after]))
                )
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[i] for i in sorted(order)]


def exact_matches(engine: Engine, tasks: list[Infill], batch: int) -> tuple[np.ndarray, int, int]:
    """Which lines come out token for token, and the tokens and forward passes of all."""
    requests = [
        engine.request(list(t.before), suffix=list(t.after), max_new_tokens=len(t.line), id=str(i))
        for i, t in enumerate(tasks)
    ]
    records = list(engine.run(requests, batch_size=batch, ignore_eos=True))
    right = np.asarray([tuple(r.tokens) == t.line for r, t in zip(records, tasks, strict=True)])
    return right, sum(r.new_tokens for r in records), sum(r.steps for r in records)


def bits_per_byte(judge: Any, prompts: list[tuple[int, ...]], outputs: list[list[int]]) -> float:
    """Bits per byte of the outputs, given their prompts, under an autoregressive model."""
    bits, size = 0.0, 0
    score = jax.jit(
        lambda params, block: jax.nn.log_softmax(judge.lm(params, block, None, wants=Wants(logits=True)).logits)
    )
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = np.zeros(width, np.int32)
        ids[: len(prompt) + len(output)] = [*prompt, *output]
        block = Block(jnp.asarray(ids)[None], jnp.arange(width)[None], jnp.zeros(1, jnp.int32))
        law = np.asarray(score(judge.params, block))[0]
        at = np.arange(len(prompt), len(prompt) + len(output))
        bits -= law[at - 1, ids[at]].sum() / math.log(2)
        size += len(judge.tokenizer.decode(output).encode())
    return float(bits / size)


def interval(difference: np.ndarray) -> tuple[float, float]:
    """A 95% interval of a mean of paired differences, normal approximation."""
    half = 1.96 * difference.std(ddof=1) / math.sqrt(len(difference))
    return round(float(difference.mean() - half), 4), round(float(difference.mean() + half), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pycode-diffusion")
    parser.add_argument("--infills", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16, help="of the infills; completions run at batch 1")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of completions; the median counts")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()

    model, judge = models.load(args.model, dtype="float32"), models.load("pycode", dtype="float32")
    tasks = infills(model.tokenizer, args.infills)
    texts = stdlib.heldout_functions(args.prompts)
    rows, base_right = [], np.zeros(0)
    engines = {pair: Engine(model, unmask=pair[0], cache=pair[1]) for pair in CONTESTANTS}
    completed, speeds = {}, {pair: [] for pair in CONTESTANTS}
    with progress(len(engines) * (args.repeats + 2)) as advance:
        for lap in range(args.repeats + 1):  # the first compiles
            for pair, engine in engines.items():
                requests = [engine.request(text, max_new_tokens=args.max_new_tokens) for text in texts]
                began = time.perf_counter()
                records = list(engine.run(requests, batch_size=1, ignore_eos=True))
                if lap:
                    speeds[pair].append(sum(r.new_tokens for r in records) / (time.perf_counter() - began))
                completed[pair] = requests, records
                advance("/".join(pair))
        for pair, engine in engines.items():
            requests, records = completed[pair]
            right, tokens, passes = exact_matches(engine, tasks, args.batch_size)
            base_right = right if pair == BASELINE else base_right
            speed, plain = (float(np.median(speeds[p])) for p in (pair, BASELINE))
            rows.append(
                {
                    "unmask": pair[0], "cache": pair[1],
                    "tokens_per_pass": round(sum(r.new_tokens for r in records) / sum(r.steps for r in records), 3),
                    "tokens_per_second": round(speed, 1), "ratio": round(speed / plain, 2),
                    "bits_per_byte": round(bits_per_byte(judge, [r.ids for r in requests], [r.tokens for r in records]), 3),
                    "infill_exact_match": round(float(right.mean()), 4),
                    "infill_difference": interval(right.astype(float) - base_right),
                    "infill_tokens_per_pass": round(tokens / passes, 3),
                }
            )  # fmt: skip
            advance("/".join(pair))
            print(json.dumps(rows[-1]), flush=True)
    about = {name: getattr(args, name) for name in ("infills", "prompts", "max_new_tokens", "repeats")}
    args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
