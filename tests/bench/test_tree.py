"""The suite that measures which nodes are accepted: its counts, its trees, its output and its errors."""

import json

import numpy as np
import pytest

from specjax import cli, models
from specjax.assembly.line import read_line
from specjax.bench import tree_parts
from specjax.bench.tree_parts import tally, with_tree
from specjax.decode import Speculate
from specjax.decode.lines import decode_of
from specjax.draft import TokenRecycling
from specjax.draft.counted import Counted
from specjax.draft.ppd.trees import parse
from specjax.expand.search import most_accepted
from specjax.serve.engine import Engine
from specjax.tree import Topology


@pytest.mark.slow
def test_what_is_counted_is_what_is_accepted_and_the_text_stays():
    """Over rows that are refilled, so that the tally must outlive them."""
    model, drafter = models.load("tiny"), TokenRecycling(tree="3 | 2 1")
    plain, counting = Engine(model, drafter=drafter), Engine(model, decode=Speculate((Counted(drafter), ())))
    asked = [
        {"role": "user", "content": f"Repeat the list. [ hen, dog, deer, {word} ]"} for word in ("cat", "owl", "ant")
    ]
    requests = [counting.request([each], max_new_tokens=16) for each in asked]
    accepted = tally(counting, requests, 2)
    records = list(plain.run(requests, batch_size=2))
    assert [r.tokens for r in counting.run(requests, batch_size=2)] == [r.tokens for r in records]
    by_depth = np.sum([record.accepted for record in records], axis=0)
    assert accepted[0] == by_depth.sum() and accepted[1:].sum() == (by_depth * np.arange(len(by_depth))).sum() > 0


def test_the_most_accepted_nodes_make_a_tree():
    """By hand: a child comes after its parent and after its better siblings, whatever their counts."""
    topology = Topology.from_counts("3 | 2 1 | 1")
    assert topology.paths == ((), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    accepted = [20, 9, 2, 4, 5, 1, 2, 5]
    found = [most_accepted(topology, accepted, nodes).counts for nodes in (2, 3, 4, 5, 6, 8)]
    assert found == ["1", "1 | 1", "1 | 1 | 1", "2 | 1 | 1", "3 | 1 | 1", "3 | 2 1 | 1"]
    with pytest.raises(ValueError, match="8 nodes, of which 2 to all can be kept, not 9"):
        most_accepted(topology, accepted, 9)
    with pytest.raises(ValueError, match="none left out"):
        most_accepted(Topology.from_choices(((1,),)), [1, 1], 2)


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("token_recycling:k=4,tree=2", "token_recycling:k=4,tree=3 | 1"),
        ("medusa:preset=paper,verifier=typical", "medusa:verifier=typical,expander=static,tree=3 | 1"),
        ("draft:expander=top_k,k=4,depth=2,model=tiny-draft", "draft:model=tiny-draft,expander=static,tree=3 | 1"),
        ("draft:expander=static,coupled=false,tree=1", "draft:coupled=false,expander=static,tree=3 | 1"),
    ],
)
def test_a_line_gets_another_tree_and_keeps_the_rest(line, made):
    assert with_tree(line, Topology.from_counts("3 | 1")) == made
    assert decode_of(None, made)


@pytest.mark.slow
def test_the_command_tries_parts_of_the_tree_and_names_the_fastest(capsys):
    words = ["bench", "tree", "--drafter", "token_recycling:tree=2 | 1", "--prompts", "4", "--max-new-tokens", "8"]
    assert cli.main([*words, "--repeats", "1"]) == 0
    *table, best = capsys.readouterr().out.splitlines()
    lines = ["token_recycling:tree=1", "token_recycling:tree=2 | 1"]
    assert len(table) == 2 + 3 and table[2].endswith(lines[0]) and table[-1].endswith(lines[1])
    assert best in [row.split("  ")[-1] for row in table[2:]]
    assert cli.main([*words, "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["nodes"] for row in found["rows"]] == [1, 2, 3] and found["counted"].startswith(
        "accepted nodes counted in "
    )
    expected = [row["expected"] for row in found["rows"]]
    assert expected == sorted(expected) and expected[0] >= 1


@pytest.mark.slow
def test_trees_for_the_states_of_ppd_are_made_of_its_prompt_tokens(capsys, monkeypatch):
    """Within each number of slots; what they promise is what their accuracy says, and grows with the slots."""
    monkeypatch.setattr(tree_parts, "SIZES", (3, 5, 9))
    words = ["bench", "tree", "--drafter", "ppd:model=tiny-ppd", "--prompts", "4", "--max-new-tokens", "12", "--json"]
    assert cli.main([*words, "--repeats", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counted"].startswith("candidates of 2 prompt tokens counted at ")
    rows = found["rows"]
    assert [row["nodes"] for row in rows] == [3, 5, 9]
    for row in rows:
        trees = parse(read_line(row["drafter"]).fields["trees"])
        assert max(len(tree.prompts) + sum(tree.prompts) for tree in trees) <= row["nodes"] + 1
    expected = [row["expected"] for row in rows]
    assert expected == sorted(expected) and expected[0] > 1
    assert all(1 <= row["tokens_per_step"] <= 3 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "measures one drafter"),
        (("--drafter", "stand,medusa"), "measures one drafter"),
        (("--drafter", "prompt_lookup"), "for drafters with a tree of one shape: token_recycling, stand"),
        (("--drafter", "draft:expander=top_k"), "ask for expander=static"),
        (("--drafter", "stand", "--peer", "transformers"), "--peer is not for the suite tree"),
        (("--drafter", "stand", "--prompts", "1"), "needs two prompts"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, message, capsys):
    assert cli.main(["bench", "tree", *words]) == 2
    assert message in capsys.readouterr().err
