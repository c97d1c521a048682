"""Naming a verifier and no expander gives a drafter the kind of tree that this verifier is for."""

import pytest

from specjax.assembly import registry
from specjax.assembly.registry import build_drafter, make_verifier, tree_of
from specjax.draft import PromptLookup
from specjax.expand import IID, Chain, GreedyDraft, Static, TopK, WithoutReplacement
from specjax.verify import Recursive


@pytest.fixture
def grown(monkeypatch):
    """The expander of a drafter's line beside a verifier; nothing is loaded."""
    monkeypatch.setattr(registry, "ready", lambda made, *_: (made, None))

    def expander(line, verifier):
        return build_drafter(line, None, tree=tree_of(make_verifier(verifier)))[0].fields["expander"]

    return expander


@pytest.mark.parametrize(
    ("line", "verifier", "wanted"),
    [
        ("draft", "coupled", Chain()),
        ("eagle2", "coupled", TopK(k=2, depth=3, nodes=6)),
        ("eagle2", "rejection", Chain(3)),
        ("eagle2", "block", Chain(3)),
        ("draft", "multi_step", IID(length=4)),  # as deep as its own chain
        ("medusa", "recursive", IID(length=2)),
        ("draft:k=2", "k_seq", IID(k=2, length=4)),
        ("draft:model=my/own,length=2", "recursive_wor", WithoutReplacement(length=2)),
        ("draft:k=2", "greedy_multi", GreedyDraft(k=2, length=4)),
        ("draft:tree=2 | 1", "recursive_wor", WithoutReplacement(length=4, tree="2 | 1")),
        # whoever says something of the tree gets that
        ("draft:expander=chain", "multi_step", Chain()),
        ("eagle2:nodes=5", "recursive_wor", TopK(k=2, depth=3, nodes=5)),
        ("medusa:tree=3", "rejection", Static.from_counts("3")),
        ("draft:length=6", "rejection", Chain(6)),
        ("eagle2:preset=paper", "multi_step", TopK(k=10, depth=8, nodes=60)),
    ],
)
def test_a_verifier_gives_its_tree(grown, line, verifier, wanted):
    assert grown(line, verifier) == wanted


def test_what_has_no_expander_stays(grown):
    assert build_drafter("prompt_lookup", None, tree=tree_of(Recursive()))[0] == PromptLookup()
    with pytest.raises(ValueError, match="unknown drafter 'frob'"):
        build_drafter("frob", None, tree=tree_of(Recursive()))


def test_trees_side_by_side_stay(monkeypatch):
    """They are taken as they are, by any of these rules."""
    seen = []
    monkeypatch.setattr(registry, "ready", lambda made, *_: (seen.append(made), None))
    monkeypatch.setattr(registry, "_fuse", lambda a, b: a)
    build_drafter("draft+medusa", None, tree=tree_of(Recursive()))
    assert [made.fields["expander"] for made in seen] == [Chain(), Static.from_counts("2 | 1")]
