"""Reverse speculative decoding against its definition by hand; where nothing passes, the student's own text."""

import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, plain, same
from support.judging import TOPOLOGY, cases, likeliest, paths

from specjax.assembly import registry
from specjax.verify import Reverse


def by_hand(case, threshold):
    p, tokens = case["p"], case["tokens"]
    possible = lambda node: p[TOPOLOGY.parents[node], tokens[node]] >= threshold
    depth, node = likeliest([path for path in paths(tokens) if all(map(possible, path))], tokens, p)
    return depth, node, p[node].argmax() if case["greedy"] else np.argmax(np.log(p[node]) + case["noise"][depth])


def test_by_hand():
    differ = []
    for found, case in cases(Reverse(0.1)):
        assert found == by_hand(case, 0.1)
        differ.append(by_hand(case, 0.2) != found)  # another threshold is seen
    assert sum(differ) >= 3


@pytest.mark.slow
def test_the_students_text_where_nothing_passes_and_the_drafts_where_all_does():
    got, state = complete(DRAFTERS["draft-chain"], MIXED, Reverse(2.0))
    assert np.asarray(state.stats.accepted)[:, 1:].sum() == 0
    cold = [row for row, options in enumerate(MIXED.options) if options["temperature"] == 0]
    same([got[row] for row in cold], [plain()[row] for row in cold])
    assert complete(DRAFTERS["draft-chain"], MIXED, Reverse(0.0))[1].stats.steps.sum() < state.stats.steps.sum() / 2


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["reverse"].guarantee == "lossy" and not Reverse.keeps_greedy
    assert registry.make_verifier("reverse:threshold=0.05") == Reverse(0.05)
    with pytest.raises(ValueError, match="reverse needs a threshold of at least 0"):
        Reverse(-1.0)
