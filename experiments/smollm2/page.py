"""The page of the experiments on SmolLM2: what they measured, in files, and the page's tables of it."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def report(name: str) -> Any:
    """What a file holds."""
    return json.loads((HERE / f"{name}.json").read_text())


def keep(name: str, found: Any) -> None:
    """Writes a file for `report`."""
    (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table, whose first row is its head."""
    head, *rest = rows
    for row in (head, ["---"] * len(head), *rest):
        yield f"| {' | '.join(row)} |"


def filled(page: str, mark: str, lines: Iterable[str]) -> str:
    """A page with these lines in its marked place.

    >>> filled("<!-- sums -->\\nold\\n<!-- end -->", "sums", ["new"])
    '<!-- sums -->\\nnew\\n<!-- end -->'
    """
    new = "\n".join([f"<!-- {mark} -->", *lines, "<!-- end -->"])
    return re.sub(rf"<!-- {re.escape(mark)} -->\n.*?<!-- end -->", lambda _: new, page, flags=re.DOTALL)


def show(written: Callable[[str], str]) -> None:
    """Writes the page anew."""
    page = HERE / "README.md"
    page.write_text(written(page.read_text()))
