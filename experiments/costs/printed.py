"""What a bench of costs prints."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from specjax.jobs import jsonl

Figures = Mapping[str, Mapping[str, float]]


def printed(found: Figures, json: bool, said: Callable[[Any], str]) -> int:
    """Prints figures by name, as one line of JSON or each in words; returns the exit status."""
    if json:
        sys.stdout.write(jsonl.dumps(found) + "\n")
    else:
        sys.stdout.writelines(f"{name:20} {said(own)}\n" for name, own in found.items())
    return 0
