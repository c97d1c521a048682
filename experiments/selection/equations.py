"""A scorer for `--select reward:module=equations.right`: which steps of a working are right arithmetic, whatever was asked."""

import re

EQUATION = re.compile(r"(\d+) *([-+*/]) *(\d+) *= *(\d+)")
SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def right(prompt: str, texts: list[str]) -> list[list[float]]:
    """For every equation of a text 1 if both sides are equal, else 0; a text without any has a 0."""
    return [[float(_holds(*found)) for found in EQUATION.findall(text)] or [0.0] for text in texts]


def _holds(a: str, sign: str, b: str, result: str) -> bool:
    if sign == "/":
        return int(b) * int(result) == int(a)
    return SIGNS[sign](int(a), int(b)) == int(result)
