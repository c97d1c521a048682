"""Lenience against its definition by hand; with none, the ordinary rule."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, same
from support.judging import V, cases, down, ordinary

from specjax.assembly import registry
from specjax.verify import Lenient, Recursive

FORMS = {"linear": lambda p, e: p / e, "square": lambda p, e: p / e**2, "exponential": lambda p, e: p**e}


def by_hand(case, epsilon, form):
    case = {**case, "p": np.eye(V)[case["p"].argmax(axis=1)]} if case["greedy"] else case

    def chance(left, first, q, token):
        return FORMS[form](left[token], epsilon) / (1 if q is None else q[token]) if left[token] > 0 else 0

    depth, node, left = down(case, chance, ordinary)
    with np.errstate(divide="ignore"):
        return depth, node, np.argmax(np.log(left) + case["noise"][depth])


@pytest.mark.parametrize(("form", "chance"), [("linear", 0.8), ("square", 1.0), ("exponential", 0.2**0.5 / 0.5)])
def test_chances(form, chance):
    p, q = jnp.asarray([[0.2, 0.8, 0.0]]), jnp.asarray([[0.5, 0.25, 0.25]])
    found = [float(Lenient(0.5, form).chance((p, q), jnp.asarray([token]))[0]) for token in range(3)]
    assert found == pytest.approx([chance, 1, 0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drawn", [True, False])
def test_by_hand(drawn, form):
    differ = []
    for found, case in cases(Lenient(0.4, form), drawn=drawn):
        assert found == by_hand(case, 0.4, form)
        differ.append(by_hand(case, 1.0, form) != found)  # a rule without lenience is seen
    assert sum(differ) >= 3


@pytest.mark.slow
def test_no_lenience_is_the_ordinary_rule():
    same(*(complete(DRAFTERS["prompt_lookup"], MIXED, rule)[0] for rule in (Lenient(1.0, "square"), Recursive())))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["lenient"].guarantee == "lossy" and Lenient.keeps_greedy
    assert registry.make_verifier("lenient:epsilon=0.2,form=square") == Lenient(0.2, "square")
    for bad in ({"epsilon": 0.0}, {"epsilon": 1.1}, {"form": "cubic"}):
        with pytest.raises(ValueError, match=r"lenient needs an epsilon in \(0, 1\]"):
            Lenient(**bad)
