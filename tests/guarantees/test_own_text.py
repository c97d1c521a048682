"""Every method that defines its own text has an oracle that holds it to that, in the fast set; and no guarantee is left out."""

import pytest
from support.collected import not_in_the_fast_set
from support.guarantees import held
from support.oracles import ORACLES

from specjax.assembly import registry
from specjax.assembly.registry import Entry

HERE = ("SEARCHES", "STEPWISE", "SELECTIONS", "MIXERS", "SAMPLERS")
"""Tables of methods whose text is their own."""
ELSEWHERE = ("VERIFIERS", "UNMASKS", "CACHES", "OLDS", "WARPERS")
"""Those that have tests of their own beside this file."""

TABLES = {
    name: table
    for name, table in vars(registry).items()
    if isinstance(table, dict) and all(isinstance(entry, Entry) for entry in table.values())
}


def test_no_table_is_left_out():
    declaring = {name for name, table in TABLES.items() if any(entry.guarantee for entry in table.values())}
    assert declaring == {*HERE, *ELSEWHERE}, "hold the methods of that table to what they declare"
    own = {
        (table, name)
        for table, entries in TABLES.items()
        for name, entry in entries.items()
        if entry.guarantee == "own text"
    }
    named = {(table, name) for table, entries in ORACLES.items() for name in entries}
    assert named == own, "name the oracle of each in tests/support/oracles.py"


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in HERE for name in TABLES[table]])
def test_a_text_of_its_own_is_declared(table, name):
    held(table.lower(), name, TABLES[table][name], {"own text": lambda: None})


def test_oracles_are_in_the_fast_set(request):
    asked = {test for entries in ORACLES.values() for test in entries.values()}
    assert not not_in_the_fast_set(request.session, asked)
