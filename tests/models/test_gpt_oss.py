"""Folders of gpt-oss: packed and plain experts, what a config says, what is refused. Logits, texts and what is written are
compared beside Llama's."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from support.shapes import changed
from support.small_experts import edited, ours

from specjax import models
from specjax.models import ModelError, hf_config
from specjax.models.experts import ExpertsConfig, route
from specjax.models.packed import mxfp4
from specjax.sharding import make_mesh

safetensors = pytest.importorskip("safetensors.numpy")
KIND = {"model_type": "gpt_oss"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


def stored(folder):
    return safetensors.load_file(folder / "model.safetensors")


def refilled(folder, to, own, **fields):
    """A copy of a folder with other tensors, and fields of its config set."""
    copy = edited(folder, to, (), **fields)
    safetensors.save_file(own, copy / "model.safetensors")
    return copy


@pytest.fixture(scope="module")
def packed(references, tmp_path_factory):
    """A folder with random MXFP4 experts, and one with the numbers that transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch, folder = pytest.importorskip("torch"), references("gpt_oss").folder
    plain, own, rng = stored(folder), stored(folder), np.random.default_rng(0)
    for layer in range(3):
        for name in ("gate_up", "down"):
            name = EXPERTS.format(layer, name)
            experts, inputs, outputs = plain[name].shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            scales = rng.integers(120, 126, blocks.shape[:-1], np.uint8)
            del own[name]
            own |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            made = convert_moe_packed_tensors(torch.as_tensor(blocks), torch.as_tensor(scales), dtype=torch.float32)
            plain[name] = made.numpy()
    path = tmp_path_factory.mktemp("packed")
    return refilled(folder, path / "packed", own, quantization_config=MXFP4), refilled(folder, path / "plain", plain)


def test_a_byte_and_a_scale():
    """The low half is the first number; codes are a sign and one of eight magnitudes."""
    assert mxfp4.decoded(np.array([[0x2F]], np.uint8), np.array([130], np.uint8)).tolist() == [-48.0, 8.0]
    every = mxfp4.decoded(np.arange(256, dtype=np.uint8)[None], np.array([127], np.uint8)).reshape(16, 16, 2)
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert every[3, :, 0].tolist() == row + [-x for x in row] == every[:, 5, 1].tolist()
    extremes = mxfp4.decoded(np.full((2, 1), 0x21, np.uint8), np.array([0, 254], np.uint8))
    assert extremes.tolist() == [2.0**-128, 2.0**-127, 2.0**126, 2.0**127]


@pytest.mark.slow
def test_packed_experts_are_those_of_transformers(packed):
    """All of them, and a mesh's: an expert a device, or where there are more devices, parts of the inner width of 12 columns,
    no whole blocks. Their logits too, of the first with two copies of every kv-head."""
    got, want = (models.load(folder, dtype="float32") for folder in packed)
    assert got.lm == want.lm and jax.tree.all(jax.tree.map(np.array_equal, got.params, want.params))
    ids = np.random.default_rng(1).integers(0, 128, (2, 12))
    logits = ours(want, ids, causal=True)
    for parts, down, bias, sinks in ((4, (1, 96, 64), (1, 192), (1,)), (8, (4, 12, 64), (4, 24), (4,))):
        split = models.load(packed[0], dtype="float32", mesh=make_mesh(f"model={parts}", jax.devices()[:parts]))
        experts = split.params["layers"][1]["mlp"]["experts"]
        shape = lambda leaf: leaf.addressable_shards[0].data.shape
        assert (shape(experts["down"]["kernel"]), shape(experts["gate_up"]["bias"])) == (down, bias)
        assert shape(split.params["layers"][0]["attention"]["sinks"]) == sinks
        jax.tree.map(np.testing.assert_array_equal, experts, want.params["layers"][1]["mlp"]["experts"])
        np.testing.assert_allclose(ours(split, ids, causal=True), logits, atol=1e-4)


def test_what_is_packed_wrongly_is_named(packed, tmp_path):
    name = EXPERTS.format(1, "down")
    for i, (change, said) in enumerate((
        (lambda own: own.pop(f"{name}_scales"), f"{name}_blocks and {name}_scales come together"),
        (lambda own: own.pop(f"{name}_blocks"), f"unused {name}_scales"),
        (lambda own: own.update({f"{name}_scales": own[f"{name}_scales"][:, 1:]}), "are not blocks of 16 bytes"),
        (lambda own: own.update({f"{name}_scales": own[f"{name}_scales"].astype(np.int32)}), "_scales I32 "),
        (lambda own: own.update({"model.norm.weight": np.zeros(64, np.uint8)}), "model.norm.weight has type U8, weights"),
    )):  # fmt: skip
        own = stored(packed[0])
        change(own)
        with pytest.raises(ModelError, match=said):
            models.load(refilled(packed[0], tmp_path / str(i), own))


def test_every_tensor_counts(references, tmp_path):
    """One that is missing or over is named."""
    folder, own = references("gpt_oss").folder, stored(references("gpt_oss").folder)
    of_a_layer = [name for name in own if ".layers." not in name or ".layers.2." in name]
    assert len(of_a_layer) == 3 + 2 + 4 * 2 + 1 + 2 + 4
    for i, name in enumerate(of_a_layer):
        copy = refilled(folder, tmp_path / str(i), {k: x for k, x in own.items() if k != name})
        with pytest.raises(ModelError, match=f"missing {name} "):
            models.load(copy)
        shutil.rmtree(copy)
    copy = refilled(
        folder, tmp_path / "more", own | {"model.layers.1.self_attn.q_norm.weight": np.zeros(4, np.float32)}
    )
    with pytest.raises(ModelError, match=r"unused model.layers.1.self_attn.q_norm.weight \[4\]"):
        models.load(copy)


def test_a_config_says_what_transformers_makes_of_it():
    """Fields that a file leaves out, and the layout of transformers 4."""
    import transformers

    old = {"rope_theta": 1e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "num_hidden_layers": 5}
    for given in ({}, old, {"layer_types": ["full_attention"] * 36}, {"swiglu_limit": 3.0, "swiglu_alpha": 2.0}):
        theirs = json.loads(transformers.GptOssConfig(**given).to_json_string(use_diff=False))
        bare = hf_config.from_hf(KIND | given)
        assert bare == hf_config.from_hf(theirs | KIND)
        written = hf_config.to_hf(bare)
        again = json.loads(transformers.GptOssConfig.from_dict(written).to_json_string(use_diff=False))
        assert hf_config.from_hf(written) == bare == hf_config.from_hf(again)
    assert [hf_config.from_hf(KIND | old).window(i) for i in range(5)] == [128, None, 128, None, 128]


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; GptOssForCausalLM has 'silu'"),
        ({"head_dim": None}, "positive integers for: head_dim"),
        ({"num_key_value_heads": 7}, "64 attention heads do not split over 7 key-value heads"),
        ({"num_hidden_layers": 10**6}, "models of up to 1000 layers are read"),
        ({"layer_types": ["chunked"] * 36}, "layer_types has unknown kinds: chunked"),
        ({"sliding_window": None}, "layer_types has sliding_attention, but the sliding window is off"),
        ({"swiglu_limit": -1}, "swiglu_limit must be a positive number, not -1"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is above 128"),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark'; weights are read in .*, mxfp4"),
    ),
)
def test_what_cannot_be_served_is_named(change, said):
    with pytest.raises(ModelError, match=said):
        hf_config.from_hf(KIND | change)


def test_what_no_family_has_is_not_written():
    gpt_oss = hf_config.from_hf(KIND)
    chosen_otherwise = dataclasses.replace(gpt_oss.experts, scoring="softmax")
    for change, said in (
        (
            {"o_bias": False},
            "has layers.mixer.o_bias=False with the rest of this model; GptOssForCausalLM comes nearest",
        ),
        ({"norm": "rounded"}, "norm.kind='rounded' with the rest of this model; GptOssForCausalLM comes nearest"),
        ({"experts": chosen_otherwise}, "has layers.feed.scoring='softmax' with the rest of this model; GptOss"),
        ({"experts": ExpertsConfig(8, 2, 16)}, "layers.mixer.sinks=True.* with the rest of this model; Qwen3Moe"),
    ):
        with pytest.raises(ModelError, match=said):
            hf_config.to_hf(changed(gpt_oss, **change))


def test_the_best_logits_are_chosen_before_a_softmax():
    """Their bias decides, and counts."""
    config = ExpertsConfig(4, 2, 8, scoring="chosen")
    weights, experts = route(
        np.array([[3.0, 1.0, 2.0, 0.0]], np.float32), np.array([-9.0, 0.0, 0.0, 3.0], np.float32), config
    )
    assert experts.tolist() == [[3, 2]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)


def test_sizes_of_published_models():
    """Parameters in billions, as the model card says them."""
    for name, billions in (("20b", 20.91), ("120b", 116.83)):
        shapes = models.abstract(f"openai/gpt-oss-{name}").params
        assert abs(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e9 - billions) < 0.01, name
