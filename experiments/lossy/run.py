"""What lossy verifiers of `tiny` gain in tokens a step and cost in right answers: `python experiments/lossy/run.py`.

Each drafter and temperature is one `specjax eval`: the rules on the same questions, against `coupled`. Writes `DRAFTER_T.json`
beside this file.
"""

import argparse
import json
from pathlib import Path

from specjax.evaluate import evaluate

FAMILIES = "math,edit,qa,lists,translate"
BOTH = ("fly", "lantern", "lantern:bound=0.3")
SAMPLED = ("typical", "ears", "ears:tolerance=1.0")
"""At temperature 0 these write greedy text (`tests/test_conformance.py`)."""
GREEDY = ("fly:window=0",)


def main() -> None:
    """Asks and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafters", default="draft,eagle3")
    parser.add_argument("--temperatures", default="1,0")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--seed", type=int, default=417)
    options = parser.parse_args()
    for drafter in options.drafters.split(","):
        for temperature in options.temperatures.split(","):
            rules = (*BOTH, *(SAMPLED if float(temperature) else GREEDY))
            found = evaluate(
                "tiny",
                dtype="float32",
                families=FAMILIES,
                level=2,
                limit=options.limit,
                seed=options.seed,
                batch_size=options.limit,
                temperature=float(temperature),
                drafter=drafter,
                verifier="coupled",
                compare=[f"verifier={rule}" for rule in rules],
            )
            name = Path(__file__).with_name(f"{drafter}_{temperature}.json")
            name.write_text(json.dumps(found.to_json(), indent=1) + "\n")
            print(drafter, temperature, found.about, flush=True)


if __name__ == "__main__":
    main()
