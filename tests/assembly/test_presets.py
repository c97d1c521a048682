"""`preset=paper`: fields as published, and what a published head drafts where its line says nothing of it."""

import pytest
from support.published import E, V, draw, specforge, toy, write

from specjax.assembly.registry import DRAFTERS, build_drafter, parse
from specjax.expand import Chain, Static, TopK

TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def test_a_preset_sets_fields_and_the_lines_own_go_before_it():
    assert parse("drafter", DRAFTERS, "kangaroo").fields == {"length": 4, "threshold": 0.3}
    assert parse("drafter", DRAFTERS, "kangaroo:preset=small").fields == {"length": 4, "threshold": 0.3}
    paper = parse("drafter", DRAFTERS, "kangaroo:preset=paper,length=5")
    assert paper.fields == {"length": 5, "threshold": 0.6} and paper.published is None
    swift = parse("drafter", DRAFTERS, "swift:preset=paper,trials=9")
    assert {name: swift.fields[name] for name in ("length", "width", "narrowing", "threshold", "trials")} == {
        "length": 25, "width": 10, "narrowing": True, "threshold": 0.8, "trials": 9,
    }  # fmt: skip
    assert parse("drafter", DRAFTERS, "eagle3:preset=paper,k=4").fields["expander"] == TopK(k=4, depth=8, nodes=60)
    tree = parse("drafter", DRAFTERS, "medusa:preset=paper").fields["expander"]
    assert (tree.nodes, tree.depth) == (64, 4)
    eagle1 = parse("drafter", DRAFTERS, "eagle1:preset=paper").fields["expander"]
    assert (eagle1.nodes, eagle1.depth) == (26, 5)


@pytest.mark.parametrize(
    "line,message",
    [
        ("eagle3:preset=big", "has the presets paper and small, not 'big'"),
        ("eagle3:preset=paper,expander=chain", "preset=paper and expander both choose the tree"),
        ("prompt_lookup:preset=paper", "has no field 'preset'"),
        ("kangaroo:preset=paper,frob=1", "has no field 'frob'"),
    ],
)
def test_presets_that_there_are_not(line, message):
    with pytest.raises(ValueError, match=message):
        parse("drafter", DRAFTERS, line)


def test_a_published_head_drafts_the_published_tree(tmp_path):
    line = f"eagle3:model={write(tmp_path, *specforge(**TAPS))}"
    tree = lambda line: build_drafter(line, toy())[0].expander
    assert tree(line) == tree(f"{line},preset=paper") == tree(f"{line},taps=0 1 2") == TopK(k=10, depth=8, nodes=60)
    assert tree(f"{line},preset=small") == Chain(3) and tree(f"{line},length=2") == Chain(2)


def test_a_published_tree_is_no_deeper_than_there_are_heads(tmp_path):
    shapes = {}
    for i in range(2):
        shapes |= {f"{i}.0.linear.weight": (E, E), f"{i}.0.linear.bias": (E,), f"{i}.1.weight": (V, E)}
    write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, draw(1, shapes), "medusa_lm_head.safetensors")
    drafter, _ = build_drafter(f"medusa:model={tmp_path}", toy())
    assert isinstance(drafter.expander, Static) and (drafter.nodes, drafter.depth) == (1 + 10 + 28, 2)
    with pytest.raises(ValueError, match="needs as many heads, there are 2"):
        build_drafter(f"medusa:model={tmp_path},preset=paper", toy())
