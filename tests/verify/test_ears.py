"""Efficient adaptive rejection sampling against its definition by hand; without tolerance, the ordinary rule."""

import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, same
from support.judging import V, cases, down, ordinary

from specjax.assembly import registry
from specjax.verify import Ears, Recursive


def by_hand(case, tolerance):
    case = {**case, "p": np.eye(V)[case["p"].argmax(axis=1)]} if case["greedy"] else case

    def chance(left, first, q, token):
        ratio = left[token] / (1 if q is None else q[token])
        return ratio + tolerance * (1 - first.max()) if left[token] > 0 else 0

    depth, node, left = down(case, chance, ordinary)
    with np.errstate(divide="ignore"):
        return depth, node, np.argmax(np.log(left) + case["noise"][depth])


@pytest.mark.parametrize("drawn", [True, False])
def test_by_hand(drawn):
    differ = []
    for found, case in cases(Ears(0.6), drawn=drawn):
        assert found == by_hand(case, 0.6)
        differ.append(by_hand(case, 0.0) != found)  # a rule without tolerance is seen
    assert sum(differ) >= 3


@pytest.mark.slow
def test_no_tolerance_is_the_ordinary_rule():
    same(*(complete(DRAFTERS["prompt_lookup"], MIXED, rule)[0] for rule in (Ears(0.0), Recursive())))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["ears"].guarantee == "lossy" and Ears.keeps_greedy
    assert registry.make_verifier("ears:tolerance=0.2") == Ears(0.2)
    for tolerance in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"ears needs a tolerance in \[0, 1\]"):
            Ears(tolerance)
