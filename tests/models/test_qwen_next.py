"""Hybrids of delta nets and attention (Qwen3-Next, Qwen3.5): texts, meshes, caches of eight bits, and forms of their files."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import Rows, ended
from support.margin import Margin, teacher_forced
from support.mesh_cases import placed

import specjax
from specjax import models
from specjax.draft import ModelDrafter, NoDrafter, PromptLookup, TokenRecycling
from specjax.expand import Static
from specjax.models import ModelError, hf_config
from specjax.sharding import make_mesh

safetensors = pytest.importorskip("safetensors.numpy")
NEW, LENGTHS = 40, (3, 11)
TREE = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(map(np.array_equal, *map(jax.tree.leaves, (a, b))))


def prompts():
    """Two, with a motif that repeats."""
    rng = np.random.default_rng(5)
    return tuple(tuple(np.resize(rng.integers(3, 128, 4), n).tolist()) for n in LENGTHS)


BATCH = Rows(prompts(), ("a", "b"), ({}, {}), NEW)


def decoder_of(name, model, mesh=None):
    """A decoder with this drafter, and its parameters; a draft by a model is by the target itself, but for its last layer."""
    lm, count = model.lm, model.lm.num_layers - 1
    draft = {**model.params, "layers": {i: model.params["layers"][i] for i in range(count)}}
    small = dataclasses.replace(lm, config=lm.config.first(count))
    drafter = {
        "none": NoDrafter(), "prompt_lookup": PromptLookup(length=4, min_ngram=1), "token_recycling": TokenRecycling(k=4),
        "itself": ModelDrafter(small, TREE),
    }[name]  # fmt: skip
    decoder = specjax.speculative(lm, drafter, mesh=mesh)
    return decoder, {"target": model.params, "draft": draft if drafter.needs_params else None}


@pytest.fixture(scope="module")
def model(references):
    return models.load(references("qwen3_5_text").folder, dtype="float32")


@pytest.fixture(scope="module")
def wanted(references, model):
    """The greedy texts of transformers, one token per pass, and logits along them."""
    import torch

    reference, made = references("qwen3_5_text"), []
    for prompt in BATCH.prompts:
        ids, cache, text = torch.as_tensor([prompt]), None, list(prompt)
        with torch.no_grad():
            for token in ids.T:
                out = reference.torch(token[None], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            for _ in range(NEW):
                text.append(int(out.logits[0, -1].argmax()))
                out = reference.torch(torch.as_tensor([text[-1:]]), past_key_values=cache, use_cache=True)
        made.append((text[len(prompt) :], reference.logits([text])[0], teacher_forced(model.lm, model.params, text)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ("none", "prompt_lookup", "token_recycling", "itself"))
def test_greedy_texts_are_those_of_transformers_token_by_token(model, wanted, name):
    got, state = ended(*decoder_of(name, model), BATCH, capacity=64, width=6)
    eps = max(float(np.abs(theirs - ours).max()) for _, theirs, ours in wanted)
    margin = Margin(eps, float(wanted[0][1].std()))
    for text, (own, logits, _), prompt in zip(got, wanted, BATCH.prompts, strict=True):
        margin.compare(text, own, logits, len(prompt))
    margin.close()
    if name == "itself":
        assert np.asarray(state.stats.accepted)[:, 0].any() and (np.asarray(state.stats.steps) < NEW).all()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ("model=2", "data=2"))
def test_a_mesh_keeps_the_text(model, spec):
    """`model` splits states and what they are made of by key heads."""
    name = "itself" if spec == "model=2" else "none"
    alone, _ = ended(*decoder_of(name, model), BATCH, capacity=64)
    decoder, params = decoder_of(name, model, make_mesh(spec, jax.devices()[:2]))
    got, state = ended(decoder, placed(decoder, params), BATCH, capacity=64)
    assert got == alone
    window, sums = state.cache.states[0]
    halves = (1, 2) if spec == "model=2" else (2, 1)
    part = lambda x: x.sharding.shard_shape(x.shape)
    assert part(sums) == (2 // halves[0], 4 // halves[1], 2, 12, 16) and part(window) == (
        2 // halves[0],
        3,
        4 // halves[1],
        56,
    )


def test_a_mesh_splits_parameters_by_key_heads(model):
    lm, mesh = model.lm, make_mesh("model=4", jax.devices()[:4])
    places = specjax.sharding.shardings(mesh, lm.axes(lm.abstract()), lm.abstract(), lm.axis_counts())
    own, shapes = places["layers"][0]["gated_delta"], lm.abstract()["layers"][0]["gated_delta"]
    part = lambda name, kind="kernel": own[name][kind].shard_shape(shapes[name][kind].shape)
    assert [part(name) for name in ("query", "value", "decay", "output")] == [(64, 12), (64, 32), (64, 2), (32, 64)]
    assert own["value_taps"].shard_shape((4, 128)) == (4, 32) and own["rate"].shard_shape((8,)) == (2,)
    assert lm.axis_counts()["state_heads"] == 4


@pytest.mark.slow
def test_a_cache_of_eight_bits_beside_states(model):
    narrow = dataclasses.replace(model, lm=dataclasses.replace(model.lm, cache_dtype="int8"))
    texts = [ended(*decoder_of(name, narrow), BATCH, capacity=64) for name in ("none", "itself")]
    assert texts[0][0] == texts[1][0]
    cache = texts[0][1].cache
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.states)} == {jnp.dtype(jnp.float32)}
    assert min(leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.key)) == 1


def test_forms_of_files(references, tmp_path):
    """Those of published folders: a prefix, a model that reads images, a layer that drafts, and experts in one tensor."""
    folder = references("qwen3_5_moe_text").folder
    want, arrays = models.load(folder, dtype="float32"), safetensors.load_file(folder / "model.safetensors")
    copy, made = shutil.copytree(folder, tmp_path / "made"), {}
    bare = {name.replace("model.language_model.", "model."): x for name, x in arrays.items()}
    for name, x in bare.items():
        at, inside, part = name.partition(".mlp.experts.")
        name = name.replace("model.", "model.language_model.")
        if not inside:
            made[name] = x
        elif part == "0.gate_proj.weight":
            each = [[bare[f"{at}{inside}{i}.{kind}_proj.weight"] for kind in ("gate", "up", "down")] for i in range(6)]
            at = f"{at}{inside}".replace("model.", "model.language_model.")
            made[f"{at}gate_up_proj"] = np.stack([np.concatenate(own[:2]) for own in each])
            made[f"{at}down_proj"] = np.stack([own[2] for own in each])
    made |= {
        "model.visual.patch_embed.proj.weight": np.ones((2, 2), np.float32),
        "mtp.fc.weight": np.ones((2, 4), np.float32),
    }
    safetensors.save_file(made, copy / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
    }
    (copy / "config.json").write_text(json.dumps(whole))
    found = models.load(copy, dtype="float32")
    assert found.lm == want.lm and same(found.params, want.params)
    models.save(tmp_path / "again", found.lm, found.params)
    again = models.load(tmp_path / "again", dtype="float32")
    assert again.lm.config.family == "qwen3_5_moe_text" and same(again.params, want.params)


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"linear_num_value_heads": 24}, "24 value heads .* do not split over 16 key heads"),
        ({"linear_conv_kernel_dim": 0}, "positive integers for: linear_conv_kernel_dim"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a number of layers, not 0"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of full_attention; at least one"),
        ({"layer_types": ["sliding_attention"] * 4}, "unknown kinds: sliding_attention"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
    ),
)
def test_what_cannot_be_served_is_named(change, said):
    sizes = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
    assert hf_config.from_hf(sizes).state_mixer(2) and not hf_config.from_hf(sizes).state_mixer(3)
    with pytest.raises(ModelError, match=said):
        hf_config.from_hf(sizes | change)
