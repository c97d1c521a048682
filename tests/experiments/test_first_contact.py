"""The ways that a real model is decoded in: all that need no training are there, and what is said of their texts."""

import json

from experiments.first_contact.__main__ import RESULTS, cell, tables
from experiments.first_contact.cases import WARPED, cases
from specjax.assembly.registry import DRAFTERS, VERIFIERS
from specjax.decode.lines import read_decode
from specjax.warpers import WARPERS


def test_every_way_that_needs_no_training_is_there():
    found = list(cases())
    assert len({(case.group, case.name) for case in found}) == len(found)
    lines = " ".join(case.line for case in found)
    free = {
        name
        for name, entry in DRAFTERS.items()
        if entry.loads in ("", "model", "datastore", "diffusion_model", "diffusion_and_trigrams")
    }
    assert free - {"none"} <= {word for case in found for word in case.line.replace(":", "+").split("+")}
    assert all(f"verifier={name}" in lines for name in VERIFIERS if name != "coupled")
    for case in found:
        if not case.devices:
            read_decode(case.line.partition(", ")[0])


def test_every_warper_is_used():
    asked = {name for own in WARPED for name in own}
    assert [each.switches for each in WARPERS if not asked & {*each.switches}] == []


def test_texts_that_are_others_are_counted():
    row = {"group": "drafters", "name": "none", "meant": "same", "like": None, "greedy": [True, True, False]}
    plain = row | {"tokens": [[1, 2], [3], [4]]}
    ours = row | {"name": "stand", "tokens": [[1, 2], [5], [4]]}
    rows = {("drafters", "none"): plain, ("drafters", "stand"): ours}
    assert [cell(ours, rows, greedy) for greedy in (True, False)] == ["no: 1 of 2", "yes"]
    assert [cell(ours | {"meant": "greedy"}, rows, greedy) for greedy in (True, False)] == [
        "no: 1 of 2",
        "not meant to be",
    ]


def test_the_committed_texts_are_plain_decodings():
    rows = json.loads(RESULTS.read_text())["rows"]
    others = [line for line in tables(rows) if "no: " in line]
    near_tie = "| `cache_dtype=int8 prompt_lookup+token_recycling` | yes | no: 1 of 3 |"  # the page has its scores
    assert [line[: len(near_tie)] for line in others] == [near_tie]
    assert rows[0]["texts"][0] == "The capital of France is Paris."
