"""Pictures have what the data says, in figures and in text; nothing here decodes."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET

import specjax
from specjax import viz
from specjax.bench import order
from specjax.bench.run import PeerRow, Report, Row
from specjax.draft import TokenRecycling
from specjax.serve.request import Record
from specjax.serve.slots import Timing
from specjax.sharding import make_mesh
from specjax.sharding.rules import placed, shardings
from specjax.state import Stats
from specjax.tree import Topology, Tree
from specjax.verify import Verdict
from specjax.viz import data, figures, files, text

SHAPE = Topology.from_choices(((0,), (1,), (0, 0), (0, 1), (1, 0)))
"""Below the root 1 and 2; below 1 the nodes 3 and 4; below 2 the node 5, which is not valid in row 0."""


def step(row_tokens=((10, 11, 12, 13, 14, 15),) * 2):
    tokens = jnp.asarray(row_tokens, jnp.int32)
    valid = jnp.ones(tokens.shape, bool).at[0, 5].set(False)
    path = jnp.asarray([[0, 1, 4], [0, -1, -1]])
    verdict = Verdict(path, jnp.asarray([2, 0]), jnp.asarray([16, -1]))
    return specjax.StepInfo(verdict, Tree.of(SHAPE, tokens, valid))


class Words:
    """A tokenizer of letters, with a space and a line break among them."""

    def decode(self, ids):
        return {10: "def", 11: " a", 12: "\n", 13: "$x$"}.get(ids[0], chr(ids[0] + 87))


def test_a_token_tree_as_text():
    assert text.token_tree(step(), tokenizer=Words()) == (
        "● def\n"
        "├─● ␣a\n"
        "│ ├─○ $x$\n"
        "│ └─● e\n"
        "│   └─▶ g\n"
        "└─○ \\n"
    )  # fmt: skip
    other = text.token_tree(step(), row=1)
    assert other.splitlines() == ["● 10", "├─○ 11", "│ ├─○ 13", "│ └─○ 14", "└─○ 12", "  └─○ 15"]  # its draw had failed


def test_a_tree_alone_has_no_path():
    assert "●" not in text.token_tree(step().tree) and text.token_tree(step().tree).count("○") == 5


def test_a_row_that_there_is_not():
    with pytest.raises(ValueError, match="there is no row 2 in a batch of 2"):
        text.token_tree(step(), row=2)


def test_a_token_tree_is_drawn_with_a_box_a_node_and_a_line_between():
    figure = viz.token_tree(step(), tokenizer=Words())
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.texts] == ["def", "␣a", "\\n", "$x$", "e", "g"]
    assert len(axes.lines) == 5 and sum(line.get_color() == figures.KEPT for line in axes.lines) == 3
    places = [label.get_position() for label in axes.texts]
    assert len(set(places)) == 6 and [x for x, _ in places] == [0, 1, 1, 2, 2, 3]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_heights_of_leaves_are_apart_and_parents_lie_between():
    nodes = data.nodes_of(step(), row=1)
    found = figures.heights(nodes)
    assert [found[node] for node in (3, 4, 5)] == [0, 1, 2] and found[1] == 0.5 and found[2] == 2 and found[0] == 1.25


def record(accepted):
    return Record("a", "b", [1], "eos", 1, 1, 1.0, accepted=accepted)


def test_acceptance_is_read_from_all_that_has_it():
    state = dataclasses.make_dataclass("State", ["stats"])(
        Stats(jnp.asarray([2, 2]), jnp.asarray([[1, 1, 0], [1, 0, 1]]))
    )
    rows = [Row("none", 1, 1, 1, 1, True, ()), Row("a", 2, 1, 1, 1, True, (0.5, 0.25))]
    report, found = Report(rows, [], ""), {"none": (), "a": (0.5, 0.25)}
    assert data.acceptances(report) == data.acceptances(report.to_json()) == found
    records = [record([1, 1]), record([1, 0, 1])]
    assert data.acceptances({"none": [record([4])], "a": records}) == found
    assert data.acceptances({"none": [record(None)], "a": state}) == data.acceptances(found) == found
    assert data.survival((5,)) == ()


def test_acceptance_in_both_forms():
    shares = {"none": (), "eagle": (1.0, 0.5), "medusa": (0.25, 0.1, 0.0)}
    assert text.acceptance(shares) == "eagle   █▅   1.00 0.50\nmedusa  ▃▁▁  0.25 0.10 0.00"
    (axes,) = viz.acceptance(shares).axes
    assert [line.get_label() for line in axes.lines] == ["eagle", "medusa"]
    assert [line.get_color() for line in axes.lines] == ["C1", "C2"]  # as the bars of the same report
    assert axes.lines[1].get_xdata().tolist() == [1, 2, 3] and axes.lines[1].get_ydata().tolist() == [0.25, 0.1, 0.0]


REPORT = Report(
    [Row("none", 1, 10.0, 1.0, 1, True, ()), Row("medusa", 2, 20.0, 2.0, 1, True, (0.5,))],
    [PeerRow("transformers", "greedy", 5.0, True)],
    "about",
)


@pytest.mark.parametrize("report", (REPORT, REPORT.to_json()))
def test_speedups(report):
    assert text.speedup(report, width=4).splitlines() == [
        "none                 ██ 1.00", "medusa               ████ 2.00", "transformers greedy  █ 0.50",
    ]  # fmt: skip
    (axes,) = viz.speedup(report).axes
    assert [bar.get_width() for bar in axes.patches] == [0.5, 1.0, 2.0]  # from below
    assert [label.get_text() for label in axes.get_yticklabels()] == ["transformers greedy", "none", "medusa"]


def test_a_bar_ends_within_an_eighth_of_a_character():
    assert text._bar(0.5, 3) == "█▌" and text._bar(1.0, 3) == "███" and text._bar(0.0, 3) == ""


ROWS = [order.Row("fixed", 4, (0, 1, 2, 3, 4)), order.Row("threshold", 2, (0, 1, 1, 2, 1))]


@pytest.mark.parametrize("rows", (ROWS, {"rows": [dataclasses.asdict(row) for row in ROWS]}))
def test_the_order_of_unmasking(rows):
    assert text.unmask_order(rows) == "fixed (4)      ·▁▃▅▇\nthreshold (2)  ·▁▁▃▁"
    figure = viz.unmask_order(rows)
    shown = figure.axes[0].images[0].get_array()
    assert shown.shape == (2, 5) and shown.mask[:, 0].all() and shown[1, 1:].tolist() == [0.5, 0.5, 1, 0.5]
    assert shown[0, 1:].tolist() == [0.25, 0.5, 0.75, 1], "few passes have the whole scale, as many have"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["fixed (4)", "threshold (2)"]


def test_the_order_of_unmasking_with_words():
    words, steps = ["a", "bc", "$", "d", "e"], {"fixed": [0, 2, 1, 2, 3]}
    assert text.unmask_order(steps, words).splitlines() == ["1  a··$··", "2  abc$d·", "3  abc$de"]
    figure = viz.unmask_order(steps, words, columns=2)
    assert figure.axes[0].images[0].get_array().tolist() == [[None, 2 / 3], [1 / 3, 2 / 3], [1, None]]
    assert [label.get_text() for label in figure.axes[0].texts] == words
    for draw in (text.unmask_order, viz.unmask_order):
        with pytest.raises(ValueError, match="draw one at a time"):
            draw(ROWS, words)
        with pytest.raises(ValueError, match="2 words do not name 5 positions"):
            draw(steps, ["a", "b"])


def test_times_by_part():
    times = {"plain": {"target": 0.004}, "eagle": {"draft": 0.001, "target": 0.006}}
    assert text.step_times(times, width=6).splitlines() == [
        "plain: 4 ms", "  target  ████ 4", "eagle: 7 ms", "  draft   █ 1", "  target  ██████ 6",
    ]  # fmt: skip
    (axes,) = viz.step_times(times).axes
    bars = {patch.get_y() + 0.35: [] for patch in axes.patches}
    for patch in axes.patches:
        bars[patch.get_y() + 0.35].append((patch.get_x(), patch.get_width()))
    np.testing.assert_allclose(bars[1.0], [(0.0, 1.0), (1.0, 6.0)])  # the target's begins where the draft's ends
    assert axes.get_xlabel() == "ms" and len(axes.get_legend().get_texts()) == 2


def test_times_of_an_engine():
    assert data.times({"run": Timing(2.0, 0.5, 1.5, 100, 10)}) == {
        "run": {"decode": 2.0, "prefill": 0.5, "compile": 1.5}
    }
    assert [data.unit_of([x])[0] for x in (2.0, 0.02, 2e-5, 0.0)] == ["s", "ms", "us", "us"]


def cached(line=None):
    """A decoder, and its state as shapes: four rows, four heads, 96 slots."""
    mesh = make_mesh(line)
    decoder = specjax.speculative(TARGET, TokenRecycling(k=4), mesh=mesh)
    params = {"target": TARGET.abstract(), "draft": None}
    bare = dataclasses.replace(decoder, mesh=None)
    state = jax.eval_shape(lambda params: bare.empty(params, 4, 96), params)
    return decoder, state if mesh is None else placed(state, shardings(mesh, decoder.axes(state), state))


def test_the_cache_on_one_device():
    decoder, state = cached()
    assert text.cache_layout(decoder, state).splitlines() == [
        "6 arrays float32, 4 rows x 4 heads x 96 slots: 295 kB, 295 kB on each of 1 devices",
        "devices  rows  heads  slots",
        "0        0-3   0-3    0-95",
    ]
    state = dataclasses.replace(state, length=jnp.asarray([5, 90, 1, 96]))
    (axes,) = viz.cache_layout(decoder, state).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 5], [0, 90], [0, 1], [0, 96]]
    assert len(axes.patches) == 1 and axes.get_xlim() == (0, 96)


def test_the_cache_over_a_mesh():
    decoder, state = cached("data=2,model=2,context=2")
    first, *lines = text.cache_layout(decoder, state).splitlines()
    assert first.endswith("295 kB, 36.9 kB on each of 8 devices")
    assert [line.split()[1:] for line in lines[1:]] == [
        [rows, heads, slots] for rows in ("0-1", "2-3") for heads in ("0-1", "2-3") for slots in ("0-47", "48-95")
    ]
    assert sorted(line.split()[0] for line in lines[1:]) == [*"01234567"]
    (axes,) = viz.cache_layout(decoder, state).axes
    assert len(axes.patches) == 16 and len(axes.texts) == 8  # a band for every row, heads and slots of a part
    assert sum(patch.get_width() * patch.get_height() for patch in axes.patches) == 4 * 96


def test_copies_of_a_cache_are_one_part():
    """Eight shards do not divide four heads, so each device holds all of it."""
    decoder, state = cached("data=1,model=8")
    assert text.cache_layout(decoder, state).splitlines()[2].split() == ["0-7", "0-3", "0-3", "0-95"]
    assert [data.devices_of(data.Tile(ids, ())) for ids in ((3,), (0, 4), (2, 3, 4), (0, 2, 4))] == [
        "3", "0,4", "2-4", "0,2,4",
    ]  # fmt: skip


def test_what_has_no_cache():
    decoder, state = cached()
    with pytest.raises(ValueError, match="the state of Speculative has no cache"):
        text.cache_layout(decoder, dataclasses.replace(state, cache=None))


def test_a_training_run():
    records = [{"step": i, "loss": 4.0 - i, "acceptance": 0.1 * i} for i in range(3)]
    axes = viz.training(records).axes
    assert [one.get_ylabel() for one in axes] == ["loss", "acceptance"] and len(axes[0].lines) == 2
    assert len(viz.training([{"step": 0, "loss": 1.0}]).axes) == 1
    told = {
        "held_out_loss": 2.0,
        "held_out_merit": 0.105,
        "held_out_acceptance": 0.1,
        "held_out_agreement_1": 0.3,
        "held_out_acceptance_2": 0.05,
    }
    left, right = viz.training([*records, {"step": 3, "loss": 1.0, "acceptance": 0.3, **told}]).axes
    labels = lambda axes: [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels(left) == ["training", "held out", "best"]
    assert labels(right) == ["training", "held out, depth 1", "held out, depth 2", "best"]


def test_without_matplotlib_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(specjax, "viz", viz)  # an import puts its module there
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "specjax.viz"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fresh = importlib.import_module("specjax.viz")
    assert fresh.text.acceptance({"a": (0.5,)}).startswith("a")
    with pytest.raises(ImportError, match=r"pictures need matplotlib: pip install 'specjax\[plot\]'"):
        fresh.token_tree(step())


@pytest.mark.parametrize(("name", "message"), (("no/a.png", "a folder that exists"), ("a.txt", "ends in .png")))
def test_a_picture_that_could_not_be_written(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        files.check_plot(str(tmp_path / name))


def test_names():
    assert set(viz.__all__) <= set(dir(viz)) and specjax.viz is viz
    assert {name for name in viz.__all__ if hasattr(text, name)} == set(viz.__all__) - {"text", "training"}
    with pytest.raises(AttributeError, match="no attribute 'pie'"):
        _ = viz.pie
