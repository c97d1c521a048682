"""What the tests of declared guarantees share."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from specjax.assembly.registry import Entry


def held(kind: str, name: str, entry: Entry, tests: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The test that holds an entry of the registry to its guarantee; fails where there is none."""
    if entry.guarantee not in tests:
        pytest.fail(
            f"the {kind} {name!r} declares {entry.guarantee!r}, and nothing here can hold a {kind} to that: declare "
            f"{' or '.join(tests)}, or write what holds it to {entry.guarantee!r}"
        )
    return tests[entry.guarantee]
