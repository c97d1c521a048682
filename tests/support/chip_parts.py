"""A process of the run on a chip whose parts sleep, fall over, or are quick: `python -m support.chip_parts FOLDER`."""

import os
import sys
import time
from pathlib import Path

from experiments.chip import worker
from experiments.chip.base import Part


def part(name, what, cases=("one", "two"), **more):
    said = lambda records, context: f"{len(records)} of {name}"
    return Part(
        name, f"The part {name}", 1.0, lambda setting: cases, lambda setting, case: lambda: what(case), said, **more
    )


def stumbles(case):
    if case == "one":
        os._exit(7)
    return {"rate": 2.0}


def fails(case):
    raise ValueError(f"nothing for {case}\nat all")


PARTS = (
    part("quick", lambda case: {"rate": 1.0}),
    part("shared", lambda case: {"rate": 3.0}, alone=False),
    part("stumbling", stumbles, ahead=1),
    part("hanging", lambda case: time.sleep(3600 * (case == "one")) or {"rate": 4.0}, ahead=1, longest=1.0),
    part("failing", fails),
    part("sleeping", lambda case: time.sleep(3600)),
    part("last", lambda case: {"rate": 5.0}, cases=("one",)),
)

if __name__ == "__main__":
    worker.main(Path(sys.argv[1]), True, PARTS)
