"""How often a model finds a key, by the length of the text: `python -m experiments.long_context.measure --tokens 1024 4096`.

Every text tells some keys, and a prompt asks for one of them. Prompts about one text are decoded together, over the text
that is read once. An answer is right if all of it is: " The key of Mara is 4271." and the end token.
"""

import argparse
import dataclasses
import json
import sys
import time

import numpy as np
from tqdm import tqdm

import specjax
from experiments.long_context.text import Prompt, Writer
from specjax.evaluate.statistics import wilson
from specjax.models import AttentionConfig, Model


def windowed(model: Model, window: int) -> Model:
    """A model whose layers with positions have a window."""
    change = lambda own: dataclasses.replace(own, window=None if own.rope is None else window)
    config = model.lm.config.mapped(AttentionConfig, change)
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, config=config))


def answered(engine: specjax.Engine, prompts: list[Prompt], shared: bool = True) -> list[bool]:
    """Which prompts about one text are answered rightly, greedily."""
    most = 12 * len(prompts[0].owners)
    requests = [engine.request(one.text, max_new_tokens=most, temperature=0.0) for one in prompts]
    records = engine.run(requests, batch_size=len(prompts), shared_prefix=shared)
    return [record.text == one.answer for record, one in zip(records, prompts, strict=True)]


def measured(model: Model, decode: str, tokens: int, texts: int, keys: int, seed: str = "test") -> dict:
    """The share of right answers over so many texts of so many keys, each asked for once."""
    writer = Writer.shipped()
    engine = specjax.Engine(model, decode)
    shares, start = [], time.process_time()
    for i in tqdm(range(texts), desc=f"{tokens} {decode}", disable=not sys.stderr.isatty()):
        right = answered(engine, writer.prompts(f"{seed} {i}", tokens, keys), shared="cache" not in decode)
        shares.append(sum(right) / len(right))
    low, high = wilson(np.asarray(shares), samples=keys)
    return {
        "tokens": tokens, "decode": decode, "n": texts * keys, "right": sum(shares) / texts, "low": low,
        "high": high, "cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-keys")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--keys", type=int, default=10, help="in a text")
    parser.add_argument("--window", type=int, help="of the layers with positions")
    parser.add_argument("--decode", nargs="+", default=["plain"])
    parser.add_argument("--cache-dtype")
    args = parser.parse_args()
    model = specjax.load(args.model, dtype="float32", cache_dtype=args.cache_dtype)
    model = model if args.window is None else windowed(model, args.window)
    for tokens in args.tokens:
        for decode in args.decode:
            row = measured(model, decode, tokens, args.texts, args.keys)
            print(json.dumps({"window": args.window, "cache_dtype": args.cache_dtype, **row}), flush=True)


if __name__ == "__main__":
    main()
