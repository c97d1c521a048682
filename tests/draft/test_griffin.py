"""GRIFFIN: its network and both stages of training against numbers of the authors' code (`support/eagles.py`).

FSPAD's published files are tried here too, and `test_fspad.py` has what else both have in common.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagles import CONFIG, TARGET, TENSORS, E, drawn, loss_and_slopes, outputs, params_of, target
from support.published import write

from specjax.draft import Fspad, Griffin
from specjax.draft.griffin.objective import TrainGriffin
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.models import ModelError
from specjax.objectives.teacher import among_likeliest

KINDS = {"fspad": Fspad, "griffin": Griffin}
H = [
    6.224505,
    -1.95071,
    5.176199,
    -0.909307,
    -1.953262,
    2.224475,
    -3.789831,
    -4.591463,
    7.381106,
    -0.891489,
    4.757034,
    -0.372595,
    -0.610792,
    1.474081,
    -3.078381,
    -4.525998,
]
MORE = [
    -1.309525,
    1.696612,
    12.082874,
    -3.98193,
    6.352172,
    -4.582742,
    -2.160265,
    0.430708,
    -0.514978,
    1.905205,
    12.709077,
    -3.247608,
    6.488779,
    -3.998639,
    -2.435188,
    0.193485,
]
TRAINED = {
    "first stage": (
        4.051901,
        {
            "layers.0.self_attn.q_proj.weight": -0.315326,
            "layers.0.self_attn.k_proj.weight": -0.804896,
            "layers.0.self_attn.v_proj.weight": 0.110097,
            "layers.0.self_attn.o_proj.weight": -1.215836,
            "layers.0.mlp.gate_proj.weight": -0.119182,
            "layers.0.mlp.up_proj.weight": 0.785238,
            "layers.0.mlp.down_proj.weight": 0.098505,
            "layers.0.post_attention_layernorm.weight": 1.354589,
            "fc.fc.weight": -1.188967,
            "fc.fc.bias": 2.20318,
            "fc.mlp.input_layernorm.weight": 3.570587,
            "fc.mlp.up_proj.weight": -1.56476,
            "fc.mlp.down_proj.weight": 0.035516,
            "fc.post_attention_layernorm.weight": -0.176858,
        },
    ),
    "second stage": (
        25.115848,
        {
            "layers.0.self_attn.q_proj.weight": 9.336682,
            "layers.0.self_attn.k_proj.weight": -6.559554,
            "layers.0.self_attn.v_proj.weight": -4.082641,
            "layers.0.self_attn.o_proj.weight": -14.05586,
            "layers.0.mlp.gate_proj.weight": 1.50345,
            "layers.0.mlp.up_proj.weight": 3.218234,
            "layers.0.mlp.down_proj.weight": 0.798828,
            "layers.0.post_attention_layernorm.weight": 3.103252,
            "fc.fc.weight": 0.394799,
            "fc.fc.bias": 11.345843,
            "fc.mlp.input_layernorm.weight": 12.007136,
            "fc.mlp.up_proj.weight": -9.454135,
            "fc.mlp.down_proj.weight": 2.754694,
            "fc.post_attention_layernorm.weight": 0.874516,
        },
    ),
    "three passes": (
        47.828034,
        {
            "layers.0.self_attn.q_proj.weight": 3.716226,
            "layers.0.self_attn.k_proj.weight": -5.109816,
            "layers.0.self_attn.v_proj.weight": -2.209045,
            "layers.0.self_attn.o_proj.weight": -16.165407,
            "layers.0.mlp.gate_proj.weight": 1.425049,
            "layers.0.mlp.up_proj.weight": 6.296631,
            "layers.0.mlp.down_proj.weight": 0.367425,
            "layers.0.post_attention_layernorm.weight": 8.966678,
            "fc.fc.weight": -14.384623,
            "fc.fc.bias": 12.170917,
            "fc.mlp.input_layernorm.weight": 17.464949,
            "fc.mlp.up_proj.weight": -11.626418,
            "fc.mlp.down_proj.weight": 1.501141,
            "fc.post_attention_layernorm.weight": -1.230137,
        },
    ),
}
FIELDS = {
    "first stage": {},
    "second stage": TrainGriffin.presets["stage2"],
    "three passes": {**TrainGriffin.presets["stage2"], "unroll": 3, "aligned": 10},
}


def test_outputs_are_the_originals():
    """Both halves of the last pair, and of a pair that feeds on its second half."""
    h, more = outputs(Griffin().bind(TARGET), params_of("griffin", drawn("griffin", 1)))
    np.testing.assert_allclose(h[1, -1], H, atol=2e-5)
    np.testing.assert_allclose(more[0, 0], MORE, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", TRAINED)
def test_loss_and_gradient_are_the_originals(stage):
    """The loss is a divergence here and a cross-entropy there: the target's entropy is taken from the original's."""
    loss, _, slopes = loss_and_slopes("griffin", TrainGriffin(Griffin().bind(TARGET), noise=0.0, **FIELDS[stage]))
    wanted, along = TRAINED[stage]
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert slopes == pytest.approx(along, rel=1e-5, abs=1e-5 * max(map(abs, along.values())))


def test_a_place_counts_where_the_texts_token_was_among_the_likeliest():
    """The authors' mask: after the tokens 3 1 4 1 5 9 the next ones, and the two likeliest tokens at every place."""
    likeliest = [(1, 2), (4, 0), (7, 6), (5, 2), (9, 1), (0, 2)]
    logits = np.zeros((1, 6, 10))
    for place, (first, second) in enumerate(likeliest):
        logits[0, place, [first, second]] = 2, 1
    labels = jnp.asarray([[1, 4, 1, 5, 9, 3]])
    assert among_likeliest(jnp.asarray(logits), labels, 2).tolist() == [[True, True, False, True, True, False]]
    assert among_likeliest(jnp.asarray(logits), labels - 10, 2).sum() == 0  # tokens that the draft lacks


@pytest.mark.parametrize("kind", KINDS)
def test_published_files_are_read(kind, tmp_path):
    tensors = drawn(kind, 1)
    folder = write(
        tmp_path, CONFIG, tensors | {"embed_tokens.weight": np.asarray(target().params["embed"]["embedding"])}
    )
    assert drafter_of(folder) == kind
    head = read_head(folder, kind, KINDS[kind], target())
    assert head.drafter.config.dense.intermediate_size == 12 and head.drafter.feature_size == 2 * E
    jax.tree.map(np.testing.assert_array_equal, head.params, params_of(kind, tensors))
    name = "layers.0.mlp.down_proj.weight"
    write(tmp_path, CONFIG, tensors | {name: tensors[name][:E]})
    with pytest.raises(ModelError, match=rf"{name} has shape \[8, 12\], expected \[16, 12\]"):
        read_head(folder, kind, KINDS[kind], target())
    write(tmp_path, CONFIG, {name: x for name, x in tensors.items() if name != "fc.mlp.up_proj.weight"})
    with pytest.raises(ModelError, match="missing fc.mlp.up_proj.weight"):
        read_head(folder, kind, KINDS[kind], target())
    write(tmp_path, CONFIG | {"num_hidden_layers": 2}, tensors)
    with pytest.raises(ModelError, match="num_hidden_layers is 2; only heads of one layer are supported"):
        read_head(folder, kind, KINDS[kind], target())
    assert {*TENSORS[kind]} == {*tensors}
