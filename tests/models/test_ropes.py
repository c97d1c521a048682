"""Frequencies and magnitudes of ropes, against those of transformers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed

from specjax.models import ModelError, hf_config, hf_rope, llama_config
from specjax.models.ropes import rope_frequencies

PLAIN = llama_config(24, 64, 20, 1, 2, 2, 32, max_position_embeddings=640)
YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 32.0, "original_max_position_embeddings": 64}
YARNS = {
    "usual": {},
    "gpt-oss": {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    "qwen": {"attention_factor": 1.25, "factor": 4.0, "rope_theta": 1e6},
    "deepseek": {"mscale": 0.7, "mscale_all_dim": 1.3, "factor": 10.0, "rope_theta": 10000.0},
    "a step": {"beta_fast": 0.02, "beta_slow": 0.01, "original_max_position_embeddings": 5},
    "no longer": {"factor": 0.5},
}


def theirs(rope, config=PLAIN):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = transformers.LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.near.num_attention_heads, head_dim=config.near.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(rope),
    )  # fmt: skip
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](made, "cpu")
    return frequencies.numpy(), magnitude


def frequencies_of(config):
    return rope_frequencies(config.rope, config.near.head_dim, config.max_position_embeddings)


def configured(rope, config=PLAIN):
    theta, scaling = hf_rope.from_hf({"rope_parameters": rope}, config.max_position_embeddings)
    return changed(config, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("name", YARNS)
def test_yarn(name):
    rope = YARN | YARNS[name]
    config = configured(rope)
    frequencies, magnitude = theirs(rope)
    np.testing.assert_allclose(frequencies_of(config), frequencies, rtol=1e-5)
    assert np.isclose(config.rope.scaling.magnitude, magnitude)
    assert hf_rope.from_hf({"rope_theta": config.rope.theta, "rope_scaling": hf_rope.to_hf(config.rope.scaling)}, 9) == (
        config.rope.theta, config.rope.scaling,
    )  # fmt: skip
    cos, sin = config.tables(jnp.arange(3)[None])
    angles = np.arange(3)[:, None] * frequencies
    np.testing.assert_allclose(cos[0, :, 0, 0], magnitude * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0, :, 0, 1], magnitude * np.sin(angles), atol=1e-5)


def test_yarn_as_model_cards_ask_for_it():
    """Qwen3's: the positions of the file stay, and the rope says those of the first training. It reaches four times those."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    sizes = {
        "vocab_size": 24,
        "hidden_size": 64,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    card = sizes | {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": 40960}
    config = hf_config.from_hf(card | {"rope_theta": 1e6, "rope_scaling": rope})
    assert (
        config.max_position_embeddings == 131072 == hf_config.from_hf(hf_config.to_hf(config)).max_position_embeddings
    )
    frequencies, magnitude = theirs(
        rope | {"rope_theta": 1e6}, dataclasses.replace(PLAIN, max_position_embeddings=40960)
    )
    np.testing.assert_allclose(frequencies_of(config), frequencies, rtol=1e-6)
    angles = np.float32(131071) * frequencies
    cos, sin = config.tables(jnp.asarray([[131071]]))
    np.testing.assert_allclose(
        cos[0, 0, 0, 0], magnitude * np.cos(angles), atol=2e-2
    )  # of angles that are known to 1 / 128
    np.testing.assert_allclose(sin[0, 0, 0, 1], magnitude * np.sin(angles), atol=2e-2)
    assert hf_config.from_hf(card).max_position_embeddings == 40960


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"factor": None}, "'yarn' needs a positive number for factor"),
        ({"beta_fast": 1, "beta_slow": 2}, "'yarn' needs a beta_slow of at most its beta_fast"),
        ({"original_max_position_embeddings": -3}, "a positive integer for original_max_position_embeddings"),
        ({"attention_factor": 0}, "attention_factor must be a positive number, not 0"),
        ({"truncate": 1}, "truncate must be true or false, not 1"),
        ({"rope_type": ["yarn"]}, r"rope type \['yarn'\]; supported are default, linear"),
        ({"rope_type": "longrope"}, "rope type 'longrope'; supported are default, linear, llama3, yarn, dynamic"),
    ),
)
def test_what_a_rope_cannot_be(change, said):
    with pytest.raises(ModelError, match=said):
        configured(YARN | change)
