"""Loosely speculative decoding against its definition by hand; without room for it, plain decoding's text."""

import numpy as np
import pytest
from support.conformance import DRAFTERS, MIXED, complete, plain, same
from support.judging import TOPOLOGY, cases, likeliest, paths

from specjax.spec import registry
from specjax.verify import Fly


def by_hand(case, threshold, window):
    p, tokens, draw, parents = case["p"], case["tokens"], case["draw"], TOPOLOGY.parents
    own = lambda node: tokens[node] == draw[parents[node]]
    entropy = lambda law: -sum(x * np.log(x) for x in law if x > 0)

    def stands(path, at):
        if own(path[at]):
            return True
        behind = path[at + 1 : at + 1 + window]
        return entropy(p[parents[path[at]]]) > threshold and len(behind) == window and all(map(own, behind))

    return likeliest([path for path in paths(tokens) if all(stands(path, at) for at in range(len(path)))], tokens, p)


@pytest.mark.parametrize("verifier", [Fly(), Fly(0.8, 0), Fly(0.5, 2)], ids=str)
def test_by_hand(verifier):
    differ = []
    for (depth, node, token), case in cases(verifier, seeds=4):
        wanted = by_hand(case, verifier.threshold, verifier.window)
        assert (depth, node) == wanted and token == case["draw"][node]
        differ.append(by_hand(case, verifier.threshold, verifier.window + 1) != wanted)  # a window too long is seen
    assert sum(differ) >= 2


def test_a_threshold_that_nothing_exceeds_is_plain_decoding_and_a_lower_one_is_not():
    same(complete(DRAFTERS["draft-chain"], MIXED, Fly(1e9))[0], plain())
    assert complete(DRAFTERS["draft-chain"], MIXED, Fly())[0] != plain()


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["fly"].guarantee == "lossy" and not Fly.keeps_greedy
    assert registry.make_verifier("fly:threshold=0.2,window=3") == Fly(0.2, 3)
    for fields in ({"threshold": -1.0}, {"window": -1}):
        with pytest.raises(ValueError, match="fly needs a threshold and a window of at least 0"):
            Fly(**fields)
