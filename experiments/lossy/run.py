"""What lossy verifiers of `tiny` gain in tokens per step and cost in right answers: `python experiments/lossy/run.py`.

Each drafter and temperature is one `specjax eval`: the rules on the same questions, against `coupled`. Writes `DRAFTER_T.json`
beside this file.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from specjax.assembly.line import extended
from specjax.evaluate import evaluate

FAMILIES = "math,edit,qa,lists,translate"
BOTH = ("fly:window=1", "lantern", "lantern:bound=0.3", "lantern:bound=2", "judge", "judge:threshold=0.9", "reflective")
SAMPLED = ("typical", "ears", "ears:tolerance=1.0", "kl_judge", "kl_judge:threshold=1.0")
"""At temperature 0 these write greedy text (`tests/test_conformance.py`)."""
GREEDY = ("fly:window=0",)
LONG = ("fly", "fly:window=1")
DRAFTERS = {"long": "draft:length=15"}
"""Lines of the drafters that are no line themselves; of `long`, with drafts as long as FLy's authors', the rules are `LONG`."""


def judged(drafter: str, rule: str) -> str:
    """A drafter's line with a rule."""
    return extended(DRAFTERS.get(drafter, drafter), f"verifier=({rule})" if ":" in rule else f"verifier={rule}")


def merged(held: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What a file holds, and beside it the rules of a later run.

    Raises:
      ValueError: where the two did not ask the same, or `coupled` did not answer alike: then nothing is paired.
    """
    if wrong := [key for key in ("decoder", "about", "families", "tokens_per_step") if held[key] != found[key]]:
        raise ValueError(f"{wrong[0]} of coupled was {held[wrong[0]]} and is {found[wrong[0]]}: run all rules again")
    new = {one["decoder"] for one in found["decoders"]}
    kept = lambda key: [one for one in held[key] if one["decoder"] not in new]
    return held | {key: [*kept(key), *found[key]] for key in ("decoders", "comparisons")}


def main() -> None:
    """Asks and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default="draft,eagle3,long")
    parser.add_argument("--temperatures", default="1,0")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--seed", type=int, default=417)
    parser.add_argument("--rules", nargs="+", help="these alone, added to what the files hold (default: all, anew)")
    options = parser.parse_args()
    for drafter in options.drafters.split(","):
        for temperature in options.temperatures.split(","):
            rules = options.rules or (*BOTH, *(SAMPLED if float(temperature) else GREEDY))
            rules = LONG if drafter in DRAFTERS and not options.rules else rules
            found = evaluate(
                "tiny",
                dtype="float32",
                families=FAMILIES,
                level=2,
                limit=options.limit,
                seed=options.seed,
                batch_size=options.limit,
                temperature=float(temperature),
                drafter=judged(drafter, "coupled"),
                compare=[f"drafter={judged(drafter, rule)}" for rule in rules],
            )
            name = Path(__file__).with_name(f"{drafter}_{temperature}.json")
            content = found.to_json()
            content = merged(json.loads(name.read_text()), content) if options.rules else content
            name.write_text(json.dumps(content, indent=1) + "\n")
            print(drafter, temperature, found.about, flush=True)


if __name__ == "__main__":
    main()
