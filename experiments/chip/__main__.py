"""Everything that only a chip can say, in some minutes: `python -m experiments.chip --minutes 8 --output FOLDER`.

It checks the library's texts and kernels on the GPU or TPU at hand, times kernels and decoding steps, and writes one JSON and
one page. The parts and their order are in `parts/__init__.py`. It runs from a checkout, without installation. A second run with
the same folder goes on where the first one ended.
"""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments.chip import conduct
from experiments.chip.page import Report
from experiments.chip.parts import PARTS
from specjax.serve.options import option
from specjax.terminal import bad_input, note, run_program, write

EVERY = 2.0
"""Seconds between two times that the page is written."""
NEEDS = (
    "jax",
    "flax",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "optax",
    "orbax",
    "huggingface_hub",
    "jinja2",
    "rich",
    "pytest",
)
"""What it imports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipOptions:
    """See the help of each."""

    minutes: float = option(8.0, "after which it has ended, whatever it came to")
    output: str = option(dataclasses.MISSING, "a folder for the records, the JSON and the page", metavar="FOLDER")
    parts: str = option(",".join(part.name for part in PARTS), "a comma list of parts")
    rehearse: bool = option(False, "a minute on a CPU, of few cases and small shapes")


def command(options: ChipOptions) -> int:
    """Runs the parts; the exit status is 1 where some case was not reached."""
    began = time.monotonic()
    with bad_input():
        chosen = [name.strip() for name in options.parts.split(",")]
        known = {part.name: part for part in PARTS}
        if unknown := [name for name in chosen if name not in known]:
            raise ValueError(f"--parts: unknown {unknown[0]!r}; there are {', '.join(known)}")
        if not options.minutes > 0:
            raise ValueError(f"--minutes must be above 0, not {options.minutes:g}")
        if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
            raise ValueError(f"{', '.join(missing)} cannot be imported: install them, or bring their wheels")
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if options.rehearse else {})}
    jax.config.update("jax_platforms", "cpu")  # this process must not take what those that it starts are to have
    report = Report(PARTS, folder, options.minutes, options.rehearse)
    written = -EVERY

    def changed(now: bool = False) -> None:
        nonlocal written
        if now or time.monotonic() - written > EVERY:
            report.write()
            written = time.monotonic()

    until = began + 60 * options.minutes - conduct.RESERVE
    parts = [part for part in PARTS if part.name in chosen]
    run = conduct.Run(folder, parts, until, options.rehearse, changed, environment)
    try:
        run.go()
    except RuntimeError as error:
        note(f"error: {error}")
        return 1
    finally:
        changed(now=True)
    page = report.write()
    write(page.read_text() if page else "no process found a device\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "Everything that only a chip can say, in some minutes: correctness, kernels, steps, weights."
    return run_program("python -m experiments.chip", about, ChipOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
