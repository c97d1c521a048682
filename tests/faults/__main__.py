"""`python -m tests.faults [NAME ...]` plants faults, one at a time, and prints which fast test catches each."""

import argparse
import sys

from tests.faults.run import caught_by
from tests.faults.table import FAULTS, Gone


def main(words: list[str] | None = None) -> int:
    """Returns 1 where a fault is not caught, or cannot be planted."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or of these: {', '.join(FAULTS)}")
    asked = parser.parse_args(words).names or list(FAULTS)
    if unknown := [name for name in asked if name not in FAULTS]:
        parser.error(f"unknown fault {unknown[0]!r}; choose {', '.join(FAULTS)}")
    width, missed = max(map(len, asked)), 0
    for name in asked:
        try:
            caught = caught_by(name)
            said = ", ".join(caught) or "NOT CAUGHT"
        except Gone as error:
            caught, said = [], f"NOT PLANTED: {error}"
        missed += not caught
        print(f"{name:{width}}  {FAULTS[name].says}\n{'':{width}}  {said}", flush=True)
    print(f"{len(asked) - missed} of {len(asked)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
