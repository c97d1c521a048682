"""S2D: what a line may say, and what is refused. `test_exits.py` has its passes, `train/test_sorted_draft.py` its training."""

import pytest
from support.conformance import TARGET

from specjax.assembly import registry
from specjax.draft import S2D, Acceptance, adaptive
from specjax.draft.s2d.exits import usual_exits
from specjax.expand import Chain


def test_a_line_names_exits_and_thresholds():
    stored = registry.DRAFTERS["s2d"].make()
    made = registry.parse("drafter", registry.DRAFTERS, "s2d:exits=6 9 12,thresholds=0.5 0.75,length=3,queue=24")
    assert made.fields == {
        "exits": (6, 9, 12), "thresholds": (0.5, 0.75), "queue": 24, "expander": Chain(3)
    } and stored.fields == {}  # fmt: skip
    assert usual_exits(12) == (6, 9, 12) and usual_exits(2) == (1, 2) and usual_exits(1) == (1,)
    assert registry.parse("drafter", registry.DRAFTERS, "s2d:thresholds=1").fields["thresholds"] == (1.0,)
    with pytest.raises(ValueError, match="thresholds must be numbers with spaces between them, got 'x'"):
        registry.parse("drafter", registry.DRAFTERS, "s2d:thresholds=x")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"exits": (2, 1)}, "ascending exits and thresholds in"),
        ({"thresholds": (1.5,)}, "ascending exits and thresholds in"),
        ({"exits": (1, 2)}, "must ascend from 1 on and end with all 3 layers"),
        ({"exits": (1, 2, 3), "thresholds": (0.5, 0.5, 0.0)}, "3 exits need 2 thresholds, .* or one for all, not 3"),
        ({"queue": 4}, "commits up to 5 tokens and the queue holds 4: choose queue=5 or more"),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        S2D(TARGET, **fields).bind(TARGET)


def test_no_rule_reads_its_features():
    with pytest.raises(ValueError, match="features"):
        adaptive(S2D(TARGET), Acceptance(0.2), 3).bind(TARGET)
