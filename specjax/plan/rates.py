"""Rates of a chip that were measured on one, in the place of those that are published or assumed."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from specjax.sharding.aot import Chip

FIELDS = "hbm_bandwidth", "flops", "launch"
"""Of `Chip`: bytes per second of its memory, dense bfloat16 operations per second, and seconds that a kernel takes to
start."""


def rated(chip: Chip, file: str | None) -> Chip:
    """A chip with the rates that a file has of it.

    Args:
      chip: as its maker describes it.
      file: JSON with `{"rates": {"h100": {"hbm_bandwidth": 3.0e12, ...}}}`, as `python -m experiments.chip` writes it; None:
        the chip stays as it is.

    Raises:
      ValueError: where it is no such file, or has nothing of this chip.
      OSError: where it cannot be read.
    """
    if file is None:
        return chip
    try:
        content = json.loads(Path(file).read_text())
        known = content["rates"]
        own = known.get(chip.name, {})
        rates = {name: float(own[name]) for name in FIELDS if name in own}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--rates {file} is no file of measured rates, such as `python -m experiments.chip` writes"
        ) from error
    if not rates:
        raise ValueError(f"--rates {file} has no rates of a {chip.name}; it has {', '.join(known) or 'no chip'}")
    if bad := [name for name, rate in rates.items() if not (math.isfinite(rate) and rate > 0)]:
        raise ValueError(f"--rates {file}: {bad[0]} of {chip.name} must be a number above 0, not {own[bad[0]]!r}")
    changes: dict[str, Any] = {**rates, "source": f"{chip.source}; {', '.join(rates)} measured, {Path(file).name}"}
    return dataclasses.replace(chip, **changes)
