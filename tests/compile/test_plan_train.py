"""`specjax plan train`: an update compiled by the TPU's compiler, which needs the extra `aot`."""

import json
import re

import pytest
from support.planned import needs_libtpu

from specjax import cli, models
from specjax.draft.eagle3 import default_taps
from specjax.plan.training import LEVEL, PlanTrainOptions, largest, prepare
from specjax.sharding import aot, make_mesh
from specjax.train import loop

TINY = ("eagle3:unroll=2", "--target", "tiny-draft", "--batch-size", "4", "--length", "64", "--draft-vocabulary", "256")


@needs_libtpu
def test_an_update_is_compiled_for_a_slice(capsys):
    """Every chip has its own quarter of parameters and moments, in float32, and half of the batch."""
    words = ("plan", "train", *TINY, "--topology", "v5e:2x2", "--mesh", "data=2,model=2", "--json")
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    memory = record["bytes_per_chip"]
    parts = ("target", "parameters", "moments", "batch", "temporaries")
    assert record["fits"] and memory["total"] == sum(memory[part] for part in parts)
    assert memory["batch"] == 2 * 64 * (4 + 1 + 4)
    assert memory["moments"] == pytest.approx(2 * memory["parameters"], abs=8)  # and two counts
    attention, fc, mlp, head = 256 * (128 + 64 + 64) + 128 * 128, 256 * 128, 3 * 128 * 256, 128 * 256
    matrices = attention + fc + mlp + head
    assert (
        matrices + fc < memory["parameters"] < 1.02 * (matrices + fc)
    )  # 4 bytes over 4 chips, of fc over 2; and norms
    assert memory["temporaries"] > 0 and record["flops"] > 0 and record["collectives"]["all-gather"]["count"] > 0
    assert (
        record["compute_dtype"] == "bfloat16" and record["compiled_layers"] == [2] and record["tokens_per_second"] > 0
    )


@needs_libtpu
def test_an_update_on_captured_features_has_no_layers_of_the_target(capsys):
    """The batch has the head's three taps and the final features, in bfloat16 as they are captured."""
    words = ("plan", "train", *TINY, "--features", "--topology", "v5e:2x2", "--mesh", "data=2,model=2", "--json")
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    memory, taps = record["bytes_per_chip"], len(default_taps(2))
    assert memory["batch"] == 2 * 64 * (4 + 1 + 4 + 2 * 128 * (taps + 1))
    assert memory["target"] == 2 * (
        1536 * 128 / 2 + 128
    )  # the table, which is its head as well, in two parts; and the norm
    assert record["features"] and record["fits"] and memory["temporaries"] > 0


@pytest.mark.slow
@needs_libtpu
def test_no_scores_of_a_whole_long_row_are_in_the_program():
    """Of 2,048 slots, 512 have theirs at a time: of the target, of the head and for the gradient. Two queries share a key."""
    options = PlanTrainOptions(drafter="eagle3:unroll=2", target="tiny-draft", topology="v5e:2x2", draft_vocabulary=256)
    mesh = make_mesh("data=4", aot.devices(options.topology))
    update = prepare(options, models.abstract(options.target, "bfloat16", mesh), mesh, 4)
    assert update.batch.tokens.shape == (4, 2048)
    lowered = loop.update.lower(update.objective, update.settings, update.state, update.target, update.batch, mesh=mesh)
    text = aot.compiled(lowered, LEVEL).as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)}
    assert {shape[-2:] for shape in shapes} >= {
        (2 * 512, 2048),
        (2 * 512, 2047),
    }  # a chunk's, of the target and of the head
    assert not [shape for shape in shapes if sum(size >= 2047 for size in shape) > 1]


def test_the_largest_batch_is_on_the_line_through_two():
    def record(rows, total, temporaries=1, data=2):
        memory = {"total": total, "limit": 1000} | ({"temporaries": temporaries} if temporaries else {})
        return {"batch_size": rows, "bytes_per_chip": memory, "mesh": {"data": data, "model": 4}, "accumulate": 2}

    some = [record(16, 500), record(8, 300), record(4, 290), record(32, 700, None)]
    assert largest(some) == {"rows": 36, "through": [8, 16], "bytes_per_row": 25}  # 16 + 500 / 25
    assert largest([record(8, 1190), record(16, 1290)])["rows"] == 0
    assert largest(some[:1]) is None and largest([record(8, 300), record(16, 300)]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ppd", *TINY[1:5], "--features"), "ppd runs the target's layers while it trains"),
        (("distill", "--target", "tiny"), "cannot plan the training of 'distill'; choose medusa, hydra, "),
        ((*TINY, "--accumulate", "3"), "--accumulate 3 does not divide --batch-size 4"),
        ((*TINY, "--batch-size", "0"), "--batch-size '0' is not a number of rows"),
        ((*TINY, "--length", "100000"), "was made for"),
        ((*TINY, "--mesh", "data=3"), "has 3 chips and v5e:2x2 has 4"),
    ],
)
@needs_libtpu
def test_what_cannot_be_planned(words, said, capsys):
    assert cli.main(("plan", "train", *words, "--topology", "v5e:2x2")) == 2
    assert said in capsys.readouterr().err
