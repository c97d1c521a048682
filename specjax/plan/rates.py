"""Measured rates of a chip, in place of published or assumed ones."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from specjax.sharding.aot import Chip

FIELDS = "hbm_bandwidth", "flops", "launch"
"""Fields of `Chip`: memory bytes per second, dense bfloat16 operations per second, and the start time of a kernel in
seconds."""


def rated(chip: Chip, file: str | None) -> Chip:
    """A chip with its rates from a file.

    Args:
      chip: the chip with published rates.
      file: JSON with `{"rates": {"h100": {"hbm_bandwidth": 3.0e12, ...}}}`, as `python -m experiments.chip` writes it;
        None: the chip is unchanged.

    Raises:
      ValueError: if it is not such a file, or lacks this chip.
      OSError: if it cannot be read.
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
            f"--rates {file} is not a file of measured rates, such as `python -m experiments.chip` writes"
        ) from error
    if not rates:
        raise ValueError(f"--rates {file} has no rates of a {chip.name}; it has {', '.join(known) or 'no chip'}")
    if bad := [name for name, rate in rates.items() if not (math.isfinite(rate) and rate > 0)]:
        raise ValueError(f"--rates {file}: {bad[0]} of {chip.name} must be a number above 0, not {own[bad[0]]!r}")
    changes: dict[str, Any] = {**rates, "source": f"{chip.source}; {', '.join(rates)} measured, {Path(file).name}"}
    return dataclasses.replace(chip, **changes)
