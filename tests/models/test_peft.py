"""Adapters as PEFT writes them, against PEFT's own models."""

import copy

import jax
import numpy as np
import pytest
from support.passes import logits

from specjax import models
from specjax.models import ModelError, adapter_writing, lora
from specjax.models.loading import naming_of
from specjax.sharding import make_mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, of tied weights, saved embeddings and seldom settings

IDS = np.random.default_rng(0).integers(0, 128, (2, 9))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "patterns": (
        "llama2",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"down_proj": 5, "layers.1.self_attn.[qk]_proj": 2, "q_proj": 4},
            "alpha_pattern": {"o_proj": 3, r"model.layers.0.*up_proj": 0.5},
            "use_rslora": True,
        },
    ),
    "dora": ("llama2", {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"], "use_dora": True}),
    "tied_both": ("llama3", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "tied_head": ("llama3", {"target_modules": ["lm_head"], "modules_to_save": ["input_layernorm", "mlp"]}),
    "tied_table": ("qwen2", {"target_modules": ["embed_tokens"], "bias": "all"}),
    "tied_still": ("llama3", {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "saved_head": ("granite", {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}),
    "saved_both": (
        "qwen2", {"target_modules": ["k_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "joined": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "experts": (
        "mixtral",
        {
            "target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"],
            "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5},
        },
    ),
    "transposed": ("gpt_oss", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
    "one_parameter": ("glm4_moe", {"target_modules": [], "target_parameters": [EXPERTS[0], "embed_tokens.weight"]}),
    "beside": ("gemma4_moe", {"target_modules": ["o_proj"], "target_parameters": [own[4:] for own in EXPERTS]}),
    "saved_experts": ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
}  # fmt: skip


def trained(base, folder, seed=0, **settings):
    """A model of PEFT with random numbers in all that is trained, and what it saves."""
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 3, "lora_alpha": 4, **settings})).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def said(model):
    with torch.no_grad():
        return model(torch.as_tensor(IDS)).logits.float().numpy()


def check(references, folder, case):
    name, settings = CASES[case]
    reference = references(name)
    want = said(trained(copy.deepcopy(reference.torch), folder, **settings))
    got = models.load(reference.folder, dtype="float32", adapter=folder)
    assert np.abs(want - reference.logits(IDS)).max() > 0.1
    np.testing.assert_allclose(logits(got.lm, got.params, IDS), want, atol=1e-4)
    return got


@pytest.mark.parametrize("case", ["tied_both"])
def test_merged_logits_are_those_of_peft(references, tmp_path, case):
    assert "head" in check(references, tmp_path / "lora", case).params


@pytest.mark.slow
@pytest.mark.covers("models", "adapters")
@pytest.mark.parametrize("case", [case for case in CASES if case != "tied_both"])
def test_merged_logits_are_those_of_peft_in_every_case(references, tmp_path, case):
    got = check(references, tmp_path / "lora", case)
    assert ("head" in got.params) == (case not in ("tied_still", "saved_both", "beside"))


@pytest.mark.slow
@pytest.mark.covers("models", "adapters")
@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_changes_of_matrices_that_share_a_tensor_are_written(references, tmp_path, name):
    """Queries, keys and values of Phi-3 are one matrix, and GLM-4 turns neighbouring rows of its queries and keys."""
    reference = references(name)
    model = models.load(reference.folder, dtype="float32")
    rng = np.random.default_rng(0)
    noisy = lambda x: np.asarray(x + 0.2 * rng.normal(size=x.shape), np.float32)
    changes = jax.tree.map(noisy, lora.fresh(jax.random.key(0), model.params, 3))
    stored = adapter_writing.stored_changes(changes, model.params, *naming_of(model))
    adapter_writing.write(tmp_path, changes, stored, 3, 4.0, name, np.float32)
    ours = logits(model.lm, lora.added(model.params, changes, 4 / 3), IDS)
    assert np.abs(ours - reference.logits(IDS)).max() > 0.1
    read = models.load(reference.folder, dtype="float32", adapter=tmp_path)
    np.testing.assert_allclose(logits(read.lm, read.params, IDS), ours, atol=1e-4)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference.torch), tmp_path).eval()
    np.testing.assert_allclose(said(theirs), ours, atol=1e-4)


def in_turn(reference, folders):
    """The model after PEFT has merged one adapter after the other, loaded from a folder that it is saved to."""
    model = copy.deepcopy(reference.torch)
    for folder in folders:
        model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    model.save_pretrained(folders[0] / "merged")
    return models.load(folders[0] / "merged", dtype="float32")


def test_adapters_are_merged_one_after_the_other(references, tmp_path, caplog):
    """DoRA's norm is of what came before it, and a saved module takes the place of it."""
    reference, folders = references("llama2"), [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    trained(copy.deepcopy(reference.torch), folders[0], 0, target_modules=["q_proj", "lm_head", "embed_tokens"])
    trained(copy.deepcopy(reference.torch), folders[1], 1, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    trained(copy.deepcopy(reference.torch), folders[2], 2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    want = in_turn(reference, folders)
    got = models.load(reference.folder, dtype="float32", adapter=folders)
    assert f"{folders[2]} replaces what an adapter before it changes: lm_head.weight" in caplog.text
    other = models.load(reference.folder, dtype="float32", adapter=folders[::-1])
    for own, theirs in zip(*(jax.tree.leaves(model.params) for model in (got, want)), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)
    assert not np.allclose(*(model.params["head"]["kernel"] for model in (got, other)), atol=1e-3)
    assert got.adapter == tuple(folders) and all(str(folder) in repr(got) for folder in folders)


@pytest.mark.slow
@pytest.mark.covers("models", "adapters", "placement")
def test_on_a_mesh_in_few_bits_and_saved(references, tmp_path):
    """The head that an adapter parts from the table, experts' matrices and saved modules lie where others do."""
    mesh = make_mesh("data=2,model=4")
    for case in ("tied_both", "experts", "saved_head"):
        reference = references(CASES[case][0])
        trained(copy.deepcopy(reference.torch), tmp_path / case, **CASES[case][1])
        one = models.load(reference.folder, dtype="float32", adapter=tmp_path / case)
        placed = models.load(reference.folder, dtype="float32", adapter=tmp_path / case, mesh=mesh)
        spread = models.spread(one.lm, one.params, mesh)[1]
        for own, theirs in zip(*(jax.tree.leaves(x) for x in (placed.params, spread)), strict=True):
            np.testing.assert_allclose(own, theirs, atol=1e-6)
            assert own.sharding.is_equivalent_to(theirs.sharding, own.ndim)
        few = models.load(reference.folder, dtype="float32", adapter=tmp_path / case, weights="int8:vocab=true")
        want = models.load(one, weights="int8:vocab=true")
        for own, theirs in zip(*(jax.tree.leaves(x.params) for x in (few, want)), strict=True):
            np.testing.assert_array_equal(own, theirs)
        models.save(tmp_path / f"{case}_whole", one.lm, one.params)
        again = models.load(tmp_path / f"{case}_whole", dtype="float32")
        assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(one.params)))


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"trainable_token_indices": [3, 5]}, r"trainable_token_indices \[3, 5\] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication .* is not supported"),
    ),
)
def test_what_peft_writes_and_nobody_merges_is_named(references, tmp_path, settings, message):
    reference = references("llama_biases")
    trained(copy.deepcopy(reference.torch), tmp_path, **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(ModelError, match=message) as error:
        models.load(reference.folder, adapter=tmp_path)
    assert "\n" not in str(error.value)
