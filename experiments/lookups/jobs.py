"""Tokens per step over jobs of 200 similar prompts: `python experiments/lookups/jobs.py` writes jobs.json."""

import argparse
import json
from pathlib import Path

import specjax
from specjax.bench.prompts import questions

FAMILIES = "json", "code", "edit"
DRAFTERS = "none", "prompt_lookup", "suffix", "suffix:pieces=0", "sam", "ngram_mod", "iad", "aded"
PROMPTS = 200


def main() -> None:
    """Every drafter on every family, eight rows at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--output", default="jobs.json", help="beside this file")
    options = parser.parse_args()
    model, found = specjax.load("tiny"), []
    for family in FAMILIES:
        plain = None
        for drafter in options.drafters:
            records = specjax.generate(model, questions(options.prompts, [family]), drafter=drafter, max_new_tokens=96)
            texts = [record.tokens for record in records]
            plain = plain or texts
            new, steps = (sum(getattr(record, name) for record in records) for name in ("new_tokens", "steps"))
            row = {"family": family, "decoder": drafter, "tokens_per_step": round(new / steps, 4)}
            found.append(row | {"new_tokens": new, "steps": steps, "identical_text": texts == plain})
    Path(__file__).with_name(options.output).write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
