"""The JSON Schema Test Suite's cases of draft 2020-12: a constraint takes no invalid instance, and a refusal names its keyword.

`JSON_SCHEMA_TEST_SUITE` is a copy of the suite, which has the folder `tests/draft2020-12`. The source distribution of the
package jsonschema holds one in its folder `json`.
"""

import os
from pathlib import Path

import pytest
from support.constraints import vocabulary

from specjax.bench import schema as suite

pytestmark = [pytest.mark.slow, pytest.mark.covers("constrain", "constraint", "json", "bench")]
pytest.importorskip("outlines_core")
VARIABLE = "JSON_SCHEMA_TEST_SUITE"
KNOWN = {368: 312}
"""By the number of cases of a copy, how many were served at least: that of jsonschema 4.26."""


def copy():
    """The folder of the cases."""
    folder = Path(os.environ.get(VARIABLE, "")) / "tests" / "draft2020-12"
    if VARIABLE not in os.environ or not folder.is_dir():
        pytest.skip(
            f"{VARIABLE} names no copy of the JSON Schema Test Suite; the source distribution of jsonschema has one, json/"
        )
    return folder


def test_no_invalid_instance_of_a_format_can_be_written():
    """Where formats are asserted, and in other optional cases."""
    made = [suite.make(one, "json", vocabulary(), 600) for one in suite.read(copy() / "optional", 10_000)]
    assert [(one.schema.dataset, one.schema.name) for one in made if one.wrong] == []
    assert sum(one.declared for one in made) >= len(made) // 2


def test_no_invalid_instance_can_be_written(capsys):
    folder = copy()
    more = suite.read(folder / "optional", 10_000)
    cases = [one for one in suite.read(folder, 10_000) if one not in more]
    made = [suite.make(one, "json", vocabulary(), 600) for one in cases]
    never = [one for one in made if one.reason == suite.NO_VALUE]
    served = [one for one in made if one.declared or one in never]
    refused = [one for one in made if one not in served]
    wrong = [(one.schema.dataset, one.schema.name) for one in made if one.wrong]
    wrong += [(one.schema.dataset, one.schema.name) for one in never if any(own.valid for own in one.schema.instances)]
    missed = [one for one in made if one.missed]
    with capsys.disabled():
        print(f"\n{'keyword':26} served refused wrong missed")
        for name in dict.fromkeys(one.schema.dataset for one in made):
            count = lambda some, name=name: sum(one.schema.dataset == name for one in some)
            print(
                f"{name:26} {count(served):6} {count(refused):7} {sum(own == name for own, _ in wrong):5} {count(missed):6}"
            )
        print(f"{'all':26} {len(served):6} {len(refused):7} {len(wrong):5} {len(missed):6}")
        print("refused:", ", ".join(f"{name} {count}" for name, count in suite.refused(refused).items()))
    assert not wrong
    assert [(one.schema.name, one.why) for one in refused if suite.KEYWORD not in one.why] == []
    assert len(served) >= KNOWN.get(len(made), len(made) // 3)
