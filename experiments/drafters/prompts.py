"""Prompts for the target to complete, from the files that it was trained on: openings of functions, one JSON line each.

python experiments/drafters/prompts.py --count 1500 > prompts.jsonl
"""

import argparse
import json

from specjax.bench import stdlib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    args = parser.parse_args()
    found = stdlib.function_openings(stdlib.training_files(), args.skip + args.count)
    for number, prompt in enumerate(found[args.skip :]):
        print(json.dumps({"id": f"train-{args.skip + number}", "prompt": prompt}))


if __name__ == "__main__":
    main()
