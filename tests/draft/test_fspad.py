"""FSPAD: its network and training against numbers of the authors' code (`support/eagles.py` says how they were made)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagles import TARGET, E, drawn, loss_and_slopes, outputs, params_of

from specjax.draft import Eagle, Fspad, Griffin
from specjax.draft.eagle.objective import TrainEagle
from specjax.draft.fspad.network import FspadHead
from specjax.lm import Block
from specjax.models import llama_config

KINDS = {"fspad": Fspad, "griffin": Griffin}
H = [
    -4.083443,
    -0.713627,
    3.547505,
    1.111991,
    -1.727956,
    6.279249,
    2.966206,
    0.655936,
    -3.967831,
    -1.093795,
    2.855857,
    2.14579,
    -2.727259,
    4.122965,
    0.450033,
    0.694672,
]
MORE = [
    4.766291,
    -1.332984,
    -7.601588,
    -1.874583,
    -6.344781,
    -1.315592,
    -0.530101,
    4.64219,
    4.591893,
    -1.654154,
    -6.412509,
    -2.852032,
    -7.575584,
    -0.06353,
    0.576602,
    3.25761,
]
LOSS = 4.225706
SLOPES = {
    "layers.0.self_attn.q_proj.weight": 1.2838,
    "layers.0.self_attn.k_proj.weight": -0.371616,
    "layers.0.self_attn.v_proj.weight": -0.291928,
    "layers.0.self_attn.o_proj.weight": -0.584672,
    "layers.0.mlp.gate_proj.weight": -0.115905,
    "layers.0.mlp.up_proj.weight": -0.123167,
    "layers.0.mlp.down_proj.weight": 0.032591,
    "layers.0.post_attention_layernorm.weight": 0.509809,
    "fc.fc.weight": 2.259177,
    "fc.fc.bias": 0.854011,
    "fc.mlp.gate_proj.weight": -1.332558,
    "fc.mlp.up_proj.weight": -0.703482,
    "fc.mlp.down_proj.weight": -0.684373,
    "fc.post_attention_layernorm.weight": 4.226412,
}


@pytest.mark.slow
def test_outputs_are_the_originals():
    """Both halves of the last pair, and of a pair that feeds on its second half."""
    h, more = outputs(Fspad().bind(TARGET), params_of("fspad", drawn("fspad", 1)))
    np.testing.assert_allclose(h[1, -1], H, atol=2e-5)
    np.testing.assert_allclose(more[0, 0], MORE, atol=2e-5)


@pytest.mark.slow
def test_loss_and_gradient_are_the_originals():
    """The loss is a divergence here and a cross-entropy there: the target's entropy is taken from the original's."""
    loss, _, slopes = loss_and_slopes("fspad", TrainEagle(Fspad().bind(TARGET), noise=0.0))
    assert loss == pytest.approx(LOSS, rel=1e-5)
    assert slopes == pytest.approx(SLOPES, rel=1e-5, abs=1e-5 * max(map(abs, SLOPES.values())))


@pytest.mark.slow
def test_features_are_sampled_by_the_raw_embedding():
    """By hand: `fc` adds both, and the layer adds nothing, so that both halves are its input."""
    head = FspadHead(llama_config(4, 2, 3, 1, 1, 1, 2, rms_norm_eps=0.0))
    kernel = lambda *rows: {"kernel": jnp.asarray(rows, jnp.float32).T}
    params = jax.tree.map(jnp.zeros_like, head.init(jax.random.key(0)))
    params |= {
        "fc": {**kernel((1, 0, 1, 0), (0, 1, 0, 1)), "bias": jnp.zeros(2)},
        "sample_norm": {"scale": jnp.ones(2)},
    }
    params["sample"] = {
        "gate": kernel((1, 0), (0, 2), (1, 1)),
        "up": kernel((1, 1), (0, 1), (1, 0)),
        "down": kernel((1, 0, 1), (0, 1, 0)),
    }
    one = Block(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
    got, _ = head(params, jnp.asarray([[[1.0, -1.0]]]), jnp.asarray([[[0.5, 2.0]]]), one, None)
    np.testing.assert_allclose(got[0, 0], 2 * [2.933723, 0.812979], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_equal_halves_without_the_other_mlp_are_eagle(kind):
    tensors = drawn(kind, 1)
    tensors["fc.mlp.down_proj.weight"][:] = 0
    halves = tensors["layers.0.mlp.down_proj.weight"]
    halves[E:] = halves[:E]
    plain = {name: tensors[name.replace("fc.", "fc.fc.")] for name in ("fc.weight", "fc.bias")}
    plain |= {name: x for name, x in tensors.items() if name.startswith("layers.")}
    plain["layers.0.mlp.down_proj.weight"] = halves[:E]
    wide = outputs(KINDS[kind]().bind(TARGET), params_of(kind, tensors))
    for got, wanted in zip(wide, outputs(Eagle().bind(TARGET), params_of("eagle1", plain)), strict=True):
        np.testing.assert_allclose(got, np.concatenate([wanted, wanted], axis=-1), atol=1e-5)
