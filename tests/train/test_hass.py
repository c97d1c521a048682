"""HASS's training against numbers of the authors' code (`support/eagles.py` says how they were made)."""

import numpy as np
import pytest
from support.conformance import but_slow
from support.eagles import TARGET, loss_and_slopes

from specjax.draft import Eagle
from specjax.draft.eagle.objective import TrainEagle
from specjax.objectives.base import Batch
from specjax.objectives.losses import ForwardKL

HASS = {
    "eagle1": (
        2.972947,
        {
            "layers.0.self_attn.q_proj.weight": -0.319228,
            "layers.0.self_attn.k_proj.weight": 0.746619,
            "layers.0.self_attn.v_proj.weight": 1.330011,
            "layers.0.self_attn.o_proj.weight": -2.294501,
            "layers.0.mlp.gate_proj.weight": -0.308294,
            "layers.0.mlp.up_proj.weight": -0.642412,
            "layers.0.mlp.down_proj.weight": -0.969477,
            "layers.0.post_attention_layernorm.weight": 2.795157,
            "fc.weight": 0.568959,
            "fc.bias": 0.361453,
        },
    ),
    "first stage": (
        12.728914,
        {
            "layers.0.self_attn.q_proj.weight": -1.61057,
            "layers.0.self_attn.k_proj.weight": 0.105497,
            "layers.0.self_attn.v_proj.weight": 2.622129,
            "layers.0.self_attn.o_proj.weight": -5.35824,
            "layers.0.mlp.gate_proj.weight": -0.531829,
            "layers.0.mlp.up_proj.weight": -2.045255,
            "layers.0.mlp.down_proj.weight": -2.059486,
            "layers.0.post_attention_layernorm.weight": 5.461705,
            "fc.weight": 4.090251,
            "fc.bias": 0.777076,
        },
    ),
    "second stage": (
        40.124688,
        {
            "layers.0.self_attn.q_proj.weight": -2.167768,
            "layers.0.self_attn.k_proj.weight": -1.781995,
            "layers.0.self_attn.v_proj.weight": 7.997671,
            "layers.0.self_attn.o_proj.weight": -16.679823,
            "layers.0.mlp.gate_proj.weight": -1.965481,
            "layers.0.mlp.up_proj.weight": -5.675202,
            "layers.0.mlp.down_proj.weight": -7.00631,
            "layers.0.post_attention_layernorm.weight": 16.729773,
            "fc.weight": 18.023815,
            "fc.bias": 4.233717,
        },
    ),
}


def test_a_query_sees_what_a_draft_of_its_depth_has():
    """The third pass over five pairs: whose output each of them was made from, by the authors' table."""
    seen = Batch(np.zeros((1, 6), np.int32), np.ones((1, 6), bool)).pairs(2).visible
    table = []
    for row in range(5):
        found = {column: 1 for column in np.flatnonzero(seen.first[0, row])}
        found |= {row - 1 + later: 2 + later for later in range(2) if seen.later[0, row, later]}
        table.append("".join(str(found.get(column, ".")) for column in range(5)))
    assert table == ["3....", "23...", "123..", "1123.", "11123"]


@pytest.mark.parametrize("name", but_slow(HASS, "eagle1", "first stage"))
def test_loss_and_gradient_are_the_originals(name):
    """The loss is a divergence here and a cross-entropy there: the target's entropy is taken from the original's."""
    fields = {} if name == "eagle1" else dict(TrainEagle.presets["hass"])
    fields |= {"divergence": ForwardKL()} if name == "first stage" else {}
    loss, _, slopes = loss_and_slopes("eagle1", TrainEagle(Eagle().bind(TARGET), noise=0.0, **fields))
    wanted, along = HASS[name]
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert slopes == pytest.approx(along, rel=1e-5, abs=1e-5 * max(map(abs, along.values())))
