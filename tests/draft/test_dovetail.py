"""Dovetail: its network, files and training against numbers of the authors' code (`support/eagles.py`)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagles import CONFIG, TARGET, B, E, T, drawn, loss_and_slopes, outputs, params_of, target
from support.published import write

from specjax.assembly.registry import build_drafter
from specjax.draft import Dovetail, Eagle
from specjax.draft.dovetail.objective import TrainDovetail
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.lm import Block
from specjax.models import LlamaLM, ModelError, llama_config

LAYERS = 2
TARGET_64 = LlamaLM(llama_config(4, 64, 4, 1, 1, 1, 2))
H = [-1.589084, -2.268562, 0.500722, -2.74565, -1.648025, 2.599901, 2.214209, -0.729587]
MORE = [1.285931, -1.818342, 2.392805, 1.458494, -3.021882, 1.492741, -1.270216, -0.851043]
LOSS = 1.536075
SLOPES = {
    "W_1": -0.809909,
    "W_2": -0.080459,
    "W_z": -0.068174,
    "input_layernorm.weight": 0.477953,
    "layers.0.mlp.down_proj.weight": 0.701682,
    "layers.0.mlp.gate_proj.weight": -0.274163,
    "layers.0.mlp.up_proj.weight": -0.03366,
    "layers.0.post_attention_layernorm.weight": 1.001413,
    "layers.0.self_attn.k_proj.weight": -0.012812,
    "layers.0.self_attn.o_proj.weight": 0.265264,
    "layers.0.self_attn.q_proj.weight": -0.028505,
    "layers.0.self_attn.v_proj.weight": -1.035318,
    "layers.1.input_layernorm.weight": 0.501041,
    "layers.1.mlp.down_proj.weight": 0.045404,
    "layers.1.mlp.gate_proj.weight": -0.146538,
    "layers.1.mlp.up_proj.weight": 0.273577,
    "layers.1.post_attention_layernorm.weight": 0.515392,
    "layers.1.self_attn.k_proj.weight": -0.040412,
    "layers.1.self_attn.o_proj.weight": -0.006398,
    "layers.1.self_attn.q_proj.weight": 0.158145,
    "layers.1.self_attn.v_proj.weight": -0.112669,
}


@pytest.mark.slow
def test_outputs_are_the_originals():
    """Of the last pair, and of a pair that feeds on it."""
    h, more = outputs(Dovetail(layers=LAYERS).bind(TARGET), params_of("dovetail", drawn("dovetail", 1)))
    np.testing.assert_allclose(h[1, -1], H, atol=1e-5)
    np.testing.assert_allclose(more[0, 0], MORE, atol=1e-5)


@pytest.mark.slow
def test_loss_and_gradient_are_the_originals():
    """The loss is a divergence here and a cross-entropy there: the target's entropy is taken from the original's."""
    objective = TrainDovetail(Dovetail(layers=LAYERS).bind(TARGET), noise=0.0)
    loss, _, slopes = loss_and_slopes("dovetail", objective)
    assert loss == pytest.approx(LOSS, rel=1e-5)
    assert slopes == pytest.approx(SLOPES, rel=1e-5, abs=1e-5 * max(map(abs, SLOPES.values())))


@functools.cache
def reading(kind, layers):
    """A head's outputs `[B, W, E]` for the rows' pairs, after its parameters, features `[B, W, E]` and tokens `[B, W]`."""
    drafter = kind(config=TARGET.config.plain(layers)).bind(TARGET)
    width = T - 1
    at = jnp.broadcast_to(jnp.arange(width)[None], (B, width))

    def read(own, features, tokens):
        pairs = Block(tokens, at, jnp.zeros((B,), jnp.int32))
        return drafter.read({"target": target().params, "draft": own}, features, pairs, None)[0]

    return jax.jit(read)


def shared(logit):
    """Parameters of a head of one layer whose gate has this logit, for features of which the first number is 1."""
    tensors = drawn("dovetail", 1)
    tensors["W_1"][:, 0] = np.eye(E)[0]
    tensors["W_z"][:] = logit * np.eye(2 * E)[0][:, None]
    own = params_of("dovetail", tensors)
    return {name: own[name] for name in own if name != "more"}


def features_and_tokens(seed):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((B, T - 1, E)).astype(np.float32)
    features[..., 0] = 1
    return jnp.asarray(features), jnp.asarray(rng.integers(1, 24, (B, T - 1)), jnp.int32)


@pytest.mark.slow
def test_a_gate_of_1_reads_features_alone_and_is_eagle():
    """EAGLE's matrix is then that of the features, below one of zeros for embeddings."""
    (features, tokens), (others, other_tokens) = features_and_tokens(1), features_and_tokens(2)
    read, own = reading(Dovetail, 1), shared(1e3)
    found = read(own, features, tokens)
    np.testing.assert_array_equal(read(own, features, other_tokens), found)
    assert np.abs(read(own, others, tokens) - found).max() > 0.1
    kernel = own["feature"]["kernel"]
    fc = {"kernel": jnp.concatenate([jnp.zeros_like(kernel), kernel]), "bias": jnp.zeros(E)}
    eagle = reading(Eagle, 1)({"fc": fc, "layer": own["layer"]}, features, tokens)
    np.testing.assert_allclose(found, eagle, atol=1e-6)


@pytest.mark.slow
def test_a_gate_of_0_reads_tokens_alone():
    (features, tokens), (others, other_tokens) = features_and_tokens(1), features_and_tokens(2)
    read, own = reading(Dovetail, 1), shared(-1e3)
    found = read(own, features, tokens)
    np.testing.assert_array_equal(read(own, others, tokens), found)
    assert np.abs(read(own, features, other_tokens) - found).max() > 0.1


def test_products_begin_as_xaviers_numbers():
    """Uniform between plus and minus the root of 6 over the inputs and outputs."""
    own = Dovetail(layers=1).bind(TARGET_64).init_params(jax.random.key(0), None)
    for name, most in (("feature", (6 / 128) ** 0.5), ("token", (6 / 128) ** 0.5), ("share", (6 / 192) ** 0.5)):
        assert {*own[name]} == {"kernel"}
        kernel = np.abs(own[name]["kernel"])
        assert 0.98 * most < kernel.max() <= most and kernel.mean() == pytest.approx(most / 2, rel=0.05)


def test_published_files_are_read(tmp_path):
    """The authors' state has copies of the target's table and head."""
    config, tensors, own = {**CONFIG, "num_hidden_layers": LAYERS}, drawn("dovetail", 1), target()
    copies = {"embed_tokens.weight": own.params["embed"]["embedding"], "lm_head.weight": own.params["head"]["kernel"].T}
    copies = {name: np.asarray(x) for name, x in copies.items()}
    folder = write(tmp_path, config, tensors | copies)
    assert drafter_of(folder) == "dovetail"
    head = read_head(folder, "dovetail", Dovetail, own)
    assert head.drafter.layers == LAYERS == head.drafter.config.num_hidden_layers
    drafter, _ = build_drafter(f"dovetail:model={folder}", own)
    assert (drafter.nodes, drafter.depth, drafter.expander.k) == (16, 8, 10)  # a published head has its paper's tree
    jax.tree.map(np.testing.assert_array_equal, head.params, params_of("dovetail", tensors))


REFUSED = {
    "missing W_2 [8, 8]": ({}, {"W_2": None}),
    "W_z has shape [8, 8], expected [16, 8]": ({}, {"W_z": np.zeros((8, 8), np.float32)}),
    "missing layers.1.input_layernorm.weight": ({}, {"layers.1.input_layernorm.weight": None}),
    "unknown layers.1.": ({"num_hidden_layers": 1}, {}),
    "missing layers.2.": ({"num_hidden_layers": 3}, {}),
    "num_hidden_layers is 0, and a head has at least 1": ({"num_hidden_layers": 0}, {}),
    "hidden_size: the head is 16 wide and 'toy' 8": ({"hidden_size": 16}, {}),
    "has the unknown flag 'frob'": ({"frob": 1}, {}),
    "lm_head.weight is not the head of 'toy'": ({}, {"lm_head.weight": np.ones((24, 8), np.float32)}),
    "embed_tokens.weight is not the embedding of 'toy'": ({}, {"embed_tokens.weight": np.ones((24, 8), np.float32)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_do_not_fit_are_one_line(message, tmp_path):
    fields, changed = REFUSED[message]
    tensors = {name: x for name, x in {**drawn("dovetail", 1), **changed}.items() if x is not None}
    folder = write(tmp_path, {**CONFIG, "num_hidden_layers": LAYERS, **fields}, tensors)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_head(folder, "dovetail", Dovetail, target())


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="dovetail: layers must be at least 1, got layers=0"):
        Dovetail(layers=0)
    with pytest.raises(ValueError, match="the head reads features of width 64, the target's are 8 wide"):
        Dovetail(config=TARGET_64.config).bind(TARGET)
