"""The limit of acceptance: a linear program over couplings, every subset of tokens, and one draft."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from specjax.verify.bounds import greedy_acceptance, optimal_acceptance


def distribution_of_drafts(q, drafts, kind):
    """The chance of every tuple of drafts."""
    out = {}
    for tokens in itertools.product(range(len(q)), repeat=drafts):
        chance, left = 1.0, 1.0
        for i, token in enumerate(tokens):
            if kind == "greedy":
                order = np.argsort(-q, kind="stable")
                top = order[: drafts - 1]
                own = (
                    q[token] / (1 - q[top].sum()) * (token not in top) if i == drafts - 1 else float(token == order[i])
                )
            elif kind == "replacement":
                own = q[token]
            else:
                own = 0.0 if token in tokens[:i] else q[token] / left
                left -= q[token]
            chance *= own
        if chance > 0:
            out[tokens] = chance
    return out


def linear_program(p, chances):
    """The best coupling of the drafts with the target's token."""
    vocab, tuples = len(p), list(chances)
    gain = np.array([[float(v in x) for v in range(vocab)] for x in tuples])
    rows, columns = np.indices(gain.shape)
    of_drafts = (rows.ravel()[None] == np.arange(len(tuples))[:, None]).astype(float)
    of_token = (columns.ravel()[None] == np.arange(vocab)[:, None]).astype(float)
    found = linprog(
        -gain.ravel(), A_eq=np.concatenate([of_drafts, of_token]), b_eq=np.concatenate([list(chances.values()), p])
    )
    assert found.success
    return -found.fun


@pytest.mark.parametrize("kind", ["replacement", "without", "greedy"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_it_is_the_linear_programs(kind, drafts):
    rng = np.random.default_rng(drafts)
    for vocab in (3, 4, 5):
        p, q = rng.dirichlet(np.full(vocab, 0.6), 2)
        if kind == "greedy":
            ours = greedy_acceptance(p, q, drafts)
        else:
            ours = optimal_acceptance(p, q, drafts, replacement=kind == "replacement")
        assert ours == pytest.approx(linear_program(p, distribution_of_drafts(q, drafts, kind)), abs=1e-6)


def test_no_subset_of_tokens_is_tighter():
    rng = np.random.default_rng(0)
    for drafts, vocab in ((2, 6), (3, 7)):
        p, q = rng.dirichlet(np.full(vocab, 0.5), 2)
        for kind in ("replacement", "without"):
            chances = distribution_of_drafts(q, drafts, kind)
            subsets = itertools.chain.from_iterable(itertools.combinations(range(vocab), n) for n in range(vocab + 1))
            least = min(
                p[list(h)].sum() - sum(c for x, c in chances.items() if set(x) <= set(h)) if h else 0.0 for h in subsets
            )
            ours = optimal_acceptance(p, q, drafts, replacement=kind == "replacement")
            assert ours == pytest.approx(1 + least, abs=1e-9)


def test_one_draft_is_the_overlap_and_more_never_hurt():
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.full(4000, 0.05), 2)
    without = [optimal_acceptance(p, q, n) for n in (1, 2, 4)]
    with_it = [optimal_acceptance(p, q, n, replacement=True) for n in (1, 2, 4)]
    assert without[0] == pytest.approx(np.minimum(p, q).sum(), abs=1e-9) == with_it[0]
    assert without == sorted(without) and all(a >= b - 1e-9 for a, b in zip(without, with_it, strict=True))
    assert greedy_acceptance(p, q, 1) == pytest.approx(without[0], abs=1e-9)
    assert optimal_acceptance(p, p, 3) == pytest.approx(1.0)


def test_fewer_tokens_than_drafts_are_all_of_them():
    q = np.array([0.7, 0.3, 0.0])
    assert optimal_acceptance(np.array([0.2, 0.3, 0.5]), q, 3) == pytest.approx(0.5, abs=1e-9)


def test_what_is_no_distribution_is_refused():
    for p, q, said in (([0.5, 0.6], [0.5, 0.5], "must be distributions"), ([1.0], [0.5, 0.5], "must be distributions")):
        with pytest.raises(ValueError, match=said):
            optimal_acceptance(np.array(p), np.array(q))
    with pytest.raises(ValueError, match="at least 1"):
        optimal_acceptance(np.array([1.0]), np.array([1.0]), 0)
