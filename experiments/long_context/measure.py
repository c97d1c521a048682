"""How often a model finds a key, by the length of the text: `python -m experiments.long_context.measure --tokens 1024 4096`.

Every text tells some keys, and a prompt asks for one of them. Prompts about one text are decoded together, over the text
that is read once. An answer is right if all of it is: " The key of Mara is 4271." and the end token.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

import specjax
from experiments.long_context.text import Prompt, Writer
from specjax.evaluate.statistics import wilson
from specjax.models import Model
from specjax.serve.request import Record


def answered(engine: specjax.Engine, prompts: list[Prompt], shared: bool = True) -> list[bool]:
    """Which prompts about one text are answered rightly, greedily."""
    records = answers(engine, prompts, shared)
    return [record.text == one.answer for record, one in zip(records, prompts, strict=True)]


def answers(
    engine: specjax.Engine, prompts: list[Prompt], shared: bool = True, temperature: float = 0.0
) -> list[Record]:
    """The answers to prompts about one text."""
    most = 12 * len(prompts[0].owners)
    requests = [engine.request(one.text, max_new_tokens=most, temperature=temperature) for one in prompts]
    return list(engine.run(requests, batch_size=len(prompts), shared_prefix=shared))


def measured(
    model: Model, decode: Mapping[str, str], tokens: int, texts: int, keys: int, temperature: float, seed: str = "test"
) -> dict:
    """The share of right answers over so many texts of so many keys, each asked for once; `decode` is the engine's
    `decode` or `drafter`."""
    writer = Writer.shipped()
    engine = specjax.Engine(model, **decode)
    shares, new, steps, start = [], 0, 0, time.process_time()
    (line,) = decode.values()
    for i in tqdm(range(texts), desc=f"{tokens} {line}", disable=not sys.stderr.isatty()):
        prompts = writer.prompts(f"{seed} {i}", tokens, keys)
        records = answers(engine, prompts, shared="cache=" not in line, temperature=temperature)
        shares.append(np.mean([own.text == one.answer for own, one in zip(records, prompts, strict=True)]))
        new, steps = new + sum(own.new_tokens for own in records), steps + sum(own.steps for own in records)
    low, high = wilson(np.asarray(shares), samples=keys)
    return {
        "tokens": tokens, "decode": line, "temperature": temperature, "n": texts * keys, "right": sum(shares) / texts,
        "low": low, "high": high, "tokens_per_step": round(new / steps, 2), "cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def line(row: dict) -> str:
    """A row of the page's tables."""
    how = row["decode"] if row["cache_dtype"] is None else f"--cache-dtype {row['cache_dtype']}"
    how += f" --temperature {row['temperature']:g}" if row.get("temperature") else ""
    share = f"{row['right']:.1%} ({100 * row['low']:.0f} to {100 * row['high']:.0f})"
    return f"| `{how}` | {row['tokens']:,} | {row['n']} | {share} | {row['tokens_per_step']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-keys")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--keys", type=int, default=10, help="in a text")
    parser.add_argument("--decode", nargs="*", default=[])
    parser.add_argument("--drafter", nargs="*", default=[])
    parser.add_argument("--cache-dtype")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    model = specjax.load(args.model, dtype="float32", cache_dtype=args.cache_dtype)
    if not (args.decode or args.drafter):
        args.decode = ["plain"]
    for tokens in args.tokens:
        for decode in [{"decode": line} for line in args.decode] + [{"drafter": line} for line in args.drafter]:
            row = measured(model, decode, tokens, args.texts, args.keys, args.temperature)
            print(json.dumps({"cache_dtype": args.cache_dtype, **row}), flush=True)


if __name__ == "__main__":
    main()
