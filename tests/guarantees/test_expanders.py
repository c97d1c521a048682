"""Trees of every expander that is exported keep the target's distribution by the rule that `best` chooses for their
kind of children; `test_drafters.py` has the text that they have by the default rule."""

import dataclasses

import pytest
from support.chains import ALPHA, MODEL, generate, p_value
from support.conformance import but_slow

from specjax.assembly.registry import EXPANDERS
from specjax.draft import Pard
from specjax.verify import Best, Recursive

SMALL = {"k": 2, "depth": 2, "nodes": 4, "length": 2, "tree": "2 | 1 2"}
"""Fields for four tokens and texts of three."""
ONE_PASS = Pard(MODEL.lm, mask_id=0)
"""A drafter of the same tables, whose levels share a distribution: that after a token 0, or after the last one."""


def expander_of(name):
    fields = EXPANDERS[name].fields
    if "tree" in fields:
        return EXPANDERS[name].make(tree=SMALL["tree"])
    return EXPANDERS[name].make(**{field: value for field, value in SMALL.items() if field in fields})


SLOW = (
    "chain", "early_stop", "static", "top_k", "eagle2", "opt_tree", "best_first", "iid", "without_replacement",
    "greedy_draft",
)  # fmt: skip


@pytest.mark.parametrize("name", but_slow(EXPANDERS, *SLOW))
def test_trees_of_an_expander_keep_the_distribution(name):
    """Chi-square of 60,000 texts by the jitted decoder, at 1e-3, see `test_power` of `verify/test_rejection.py`."""
    expander = expander_of(name)
    drafter = dataclasses.replace(ONE_PASS if expander.needs_shared else MODEL, expander=expander)
    # the rule that `best` has for these runs for long, and has its own test in `verify/test_optimal.py`
    state = generate(drafter, Recursive() if drafter.children == "iid" else Best())
    assert p_value(state) > ALPHA
    accepted = state.stats.accepted.sum(axis=0)
    assert accepted[1:].sum() and accepted[:-1].sum()
