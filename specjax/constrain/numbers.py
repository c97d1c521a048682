"""Ranges of numbers as regular expressions over their usual digits."""

import math

FRACTION = r"(?:\.[0-9]+)?"
"""Digits after the point, or none."""
DIGITS = 15
"""Decimal digits that every double keeps: numbers of no more differ as doubles if they differ."""
LARGEST = 10**30
"""No bounded number is larger, and no bound from below."""
EXACT = 10 ** (DIGITS - 1)
"""Up to which a bounded number may have digits after the point."""


def integers(low: float | None, high: float | None) -> str | None:
    """The integers from `low` to `high`, both included; None stands for no bound, and as a result for no integer."""
    least, most = None if low is None else math.ceil(low), None if high is None else math.floor(high)
    if least is not None and most is not None and least > most:
        return None
    parts = []
    if most is None or most >= 0:
        parts.append(_naturals(max(least or 0, 0), most))
    if least is None or least < 0:
        parts.append(f"-(?:{_naturals(1 if most is None or most >= 0 else -most, None if least is None else -least)})")
    return "|".join(parts)


MOST_LISTED = 1000
"""Multiples that are written out."""


def multiples(step: int, low: int | None, high: int | None) -> str | None:
    """The multiples of an integer between two bounds; None for none.

    If the step divides 1000 and no more than 0 or 1 bounds it from below, the last digits tell, and these are all. Else they
    are written out, and `MOST_LISTED` of them at most.
    """
    width = next((width for width in range(1, 4) if 10**width % step == 0), None)
    if width is None or high is not None or low not in (None, 0, 1):
        if low is None and high is None:
            low = -(MOST_LISTED // 2) * step
        first = high - MOST_LISTED * step if low is None and high is not None else low or 0
        first = -(-first // step) * step
        last = first + (MOST_LISTED - 1) * step if high is None else min(high, first + (MOST_LISTED - 1) * step)
        return "|".join(map(str, range(first, last + 1, step))) or None
    ends = "|".join(f"{own:0{width}}" for own in range(0, 10**width, step))
    short = "|".join(str(own) for own in range(step, 10**width, step))
    above = f"(?:{short + '|' if short else ''}[1-9][0-9]*(?:{ends}))"
    return f"-?{above}|0" if low is None else above if low else f"{above}|0"


def numbers(low: int | None, high: int | None, above: bool, below: bool) -> str | None:
    """The decimal numbers between two integers, without exponents; None for none.

    Args:
      low: the least; None: no bound.
      high: the largest; None: no bound.
      above: whether `low` itself is left out.
      below: whether `high` itself is left out.
    """
    parts = []
    if high is None or high > 0 or high == 0 and not below:
        positive = low is None or low < 0
        parts.append(_decimals(0 if positive else low or 0, high, not positive and above, below))
    if low is None or low < 0:
        negative = high is None or high > 0
        own = _decimals(0 if negative else -(high or 0), None if low is None else -low, not negative and below, above)
        parts.append(f"-(?:{own})" if own else None)
    found = [part for part in parts if part]
    return "|".join(found) or None


def _decimals(low: int, high: int | None, above: bool, below: bool) -> str | None:
    """The numbers between two natural ones. None has so many digits that rounding carries it to a bound that is left out."""
    if high is not None and (low > high or low == high and (above or below)):
        return None
    if low >= EXACT:
        return integers(low + above, None if high is None else high - below)
    if high is not None and high > EXACT:
        return "|".join(filter(None, (_decimals(low, EXACT, above, True), _decimals(EXACT, high, False, below))))
    parts, first, last = [], low + above, None if high is None else high - 1 - below
    if above:
        parts.append(f"{low}{fraction(len(str(low)))}")
    if last is None or first <= last:
        parts.append(f"(?:{_naturals(first, last)}){FRACTION}")
    if high is not None and not below:
        parts.append(rf"{high}(?:\.0+)?")
    elif high is not None and first < high:
        parts.append(rf"{high - 1}(?:\.0+|{fraction(len(str(high - 1)))})?")
    return "|".join(parts) or None


def fraction(whole: int) -> str:
    """Digits after the point of a number with `whole` digits before it: as many as are read exactly, and not all 0."""
    return rf"\.[0-9]{{0,{DIGITS - whole - 1}}}[1-9]0*"


def _naturals(low: int, high: int | None) -> str:
    """The natural numbers from `low` to `high`, both included, without leading zeros."""
    width, whole = len(str(low)), low == 10 ** (len(str(low)) - 1)
    if high is not None and width == len(str(high)):
        return "|".join(_same_width(str(low), str(high)))
    parts = [] if whole else _same_width(str(low), "9" * width)
    digits = width - 1 if whole else width
    if high is None:
        return "|".join([*parts, f"[1-9][0-9]{{{digits},}}"])
    last = len(str(high)) - 1
    if digits < last:
        parts.append(f"[1-9][0-9]{{{digits},{last - 1}}}")
    return "|".join(parts + _same_width(str(10**last), str(high)))


def _same_width(low: str, high: str) -> list[str]:
    """Expressions for the numbers between two of equally many digits."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low[0] == high[0]:
        return [f"{low[0]}(?:{'|'.join(_same_width(low[1:], high[1:]))})" if rest else low[0]]
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")]
    first, last = int(low[0]), int(high[0])
    parts = [f"{first}(?:{'|'.join(_same_width(low[1:], '9' * rest))})"]
    if last - first > 1:
        parts.append(f"[{first + 1}-{last - 1}][0-9]{{{rest}}}")
    return [*parts, f"{last}(?:{'|'.join(_same_width('0' * rest, high[1:]))})"]
