"""What `specjax plan` says of the steps that the run times: `python -m experiments.chip.plans h100 h200` writes `plans.json`.

It needs the extra `aot`. Plans of other chips that the file has stay in it.
"""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from experiments.chip import records
from experiments.chip.base import Setting
from experiments.chip.parts import steps, weights
from specjax import cli
from specjax.sharding.aot import CHIPS

TOPOLOGIES = {"h100": "h100:1", "h200": "h200:1", "v5e": "v5e:1x1"}


def plan(topology: str, step: steps.Step) -> dict[str, Any] | None:
    """At least and at most seconds of a step, and the bytes that it moves; None where it does not fit."""
    words = ["plan", "--model", steps.MODELS[step.model], "--topology", topology, "--drafter", step.drafter, "--json"]
    words += ["--batch", str(step.batch), "--context", str(steps.CONTEXT)]
    words += [] if step.weights is None else ["--weights", step.weights]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        cli.main(words)
    record = json.loads(said.getvalue())
    if "seconds" not in record or not record["fits"]:
        return None
    short = lambda seconds: float(f"{seconds:.4g}")
    least, most = record["seconds"]["step"], record["serial_seconds"]["step"]
    return {"least": short(least), "most": short(most), "bytes": record["bytes_accessed"]}


def main(names: Sequence[str]) -> None:
    """Plans the steps for every chip that is named."""
    every = dict(steps.plans())
    for name in names:
        setting = Setting("tpu" if name.startswith("v") else "gpu", CHIPS[name].kinds[0])
        own = every.setdefault(name, {})
        for step in (step for step in [*steps.steps(setting), *weights.steps_of(setting)] if not step.looped):
            found = None if str(step) in own else plan(TOPOLOGIES[name], step)
            own |= {} if found is None else {str(step): found}
            print(name, step, own.get(str(step)), file=sys.stderr, flush=True)
            records.write(steps.PLANS, json.dumps({"context": steps.CONTEXT, "plans": every}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(TOPOLOGIES))
