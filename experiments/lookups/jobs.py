"""Tokens per step over jobs of 200 similar prompts: `python experiments/lookups/jobs.py` writes jobs.json."""

import json
from pathlib import Path

import specjax
from specjax.bench.prompts import questions

FAMILIES = "json", "code", "edit"
DRAFTERS = "none", "prompt_lookup", "suffix", "suffix:pieces=0", "sam", "ngram_mod", "iad", "aded"
PROMPTS = 200


def main() -> None:
    """Every drafter on every family, eight rows at a time."""
    model, found = specjax.load("tiny"), []
    for family in FAMILIES:
        plain = None
        for drafter in DRAFTERS:
            records = specjax.generate(model, questions(PROMPTS, [family]), drafter=drafter, max_new_tokens=96)
            texts = [record.tokens for record in records]
            plain = plain or texts
            new, steps = (sum(getattr(record, name) for record in records) for name in ("new_tokens", "steps"))
            row = {"family": family, "decoder": drafter, "tokens_per_step": round(new / steps, 4)}
            found.append(row | {"new_tokens": new, "steps": steps, "identical_text": texts == plain})
    Path(__file__).with_name("jobs.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
