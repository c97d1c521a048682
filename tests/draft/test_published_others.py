"""Medusa-2 models, PPD's prompt tokens and Kangaroo's adapters, as the code that publishes them writes them; whose it is."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.conformance import TARGET, complete, params, plain, same
from support.published import BF16, E, V, decoder_layer, draw, llama, toy, write

import specjax
from specjax.draft import PPD, Kangaroo, Medusa
from specjax.draft.heads.folder import read_head
from specjax.draft.heads.published import drafter_of
from specjax.draft.kangaroo import network as adapter
from specjax.draft.ppd.published import PAPER_TREES
from specjax.draft.ppd.trees import parse
from specjax.lm import Block
from specjax.models import ModelError

SMALL = "2 @ 3x3; 2 | 1 @ 3 2x3; 1 | 1 | 1 @ 3 2x3"


def medusa2(folder):
    """A model that `save_pretrained` wrote with its heads, `medusa_head`, an `nn.ModuleList` beside the model."""
    specjax.models.save(folder, TARGET, params()["target"])
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MedusaModelLlama"], "medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {}
    for i in range(3):  # the published configurations say 2
        at = f"medusa_head.{i}"
        shapes |= {f"{at}.0.linear.weight": (E, E), f"{at}.0.linear.bias": (E,), f"{at}.1.weight": (V, E)}
    heads = draw(3, shapes)
    save_file({**load_file(folder / "model.safetensors"), **heads}, folder / "model.safetensors")
    return heads


def test_a_medusa_2_model_is_target_and_head_in_one(tmp_path):
    heads = medusa2(tmp_path)
    target = specjax.models.load(tmp_path)
    np.testing.assert_array_equal(target.params["norm"]["scale"], params()["target"]["norm"]["scale"])
    assert drafter_of(tmp_path) == "medusa"
    head = read_head(tmp_path, "medusa", Medusa, target)
    assert (head.format, head.drafter.heads, head.notes) == ("medusa-2", 3, ())
    np.testing.assert_array_equal(
        head.params["heads"][2]["kernel"], heads["medusa_head.2.1.weight"].astype(np.float32).T
    )
    assert any("should be --model" in note for note in read_head(tmp_path, "medusa", Medusa, toy()).notes)
    other = {**params()["target"], "embed": {"embedding": params()["target"]["embed"]["embedding"] * 2}}
    with pytest.raises(ModelError, match="model.embed_tokens.weight is not the embedding of 'toy'"):
        read_head(tmp_path, "medusa", Medusa, toy(own=other))


def prompts(folder, members=1, file="adapter_model.safetensors", **more):
    """PEFT's folder of a `PromptConfig`: `adapter_config.json` and one tensor, special tokens first, then ensembles."""
    config = {
        "aggregation_type": "mean", "auto_mapping": None, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "inference_mode": True, "num_attention_heads": 8, "num_exits": 1, "num_layers": 3, "num_special_tokens": 3,
        "num_transformer_submodules": 1, "num_virtual_tokens": 3 * members, "peft_type": "PROMPT_TUNING",
        "prefix_virtual_tokens": None, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "Next 2 word",
        "revision": None, "task_type": None, "token_dim": E, "tokenizer_kwargs": None, "tokenizer_name_or_path": "x",
        "use_cache": True, "use_custom_lm_head": False, "use_prefix_tuning": False,
        "virtual_tokens_per_special_token": members, "vt_attention_type": "ensemble" if members > 1 else "decoder",
    }  # fmt: skip
    tensors = draw(5, {"prompt_embeddings": (3 * members, E)}, np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
    save_file(tensors, folder / file)
    return tensors["prompt_embeddings"]


def test_prompt_tokens_are_read_with_the_published_trees(tmp_path):
    table = prompts(tmp_path)
    assert drafter_of(tmp_path) == "ppd"
    head = read_head(tmp_path, "ppd", PPD, toy())
    assert head.drafter.trees == PAPER_TREES and "trees that were published" in head.notes[0]
    np.testing.assert_array_equal(head.params["embeddings"], table[:, None])
    trees = parse(PAPER_TREES)  # nodes and prompt slots of every state, as the authors count them
    assert [len(tree.prompts) for tree in trees[1:]] == [11, 34, 35]
    assert [len(tree.prompts) + sum(tree.prompts) for tree in trees[1:]] == [44, 109, 109]
    ensembles = prompts(tmp_path / "two", members=2)
    head = read_head(tmp_path / "two", "ppd", PPD, toy(), trees=SMALL)
    assert (head.drafter.ensembles, head.drafter.trees, head.notes) == (2, SMALL, ())
    np.testing.assert_array_equal(head.params["embeddings"][1], ensembles[2:4])


@pytest.mark.parametrize(
    "change,chosen,message",
    [
        ({"use_prefix_tuning": True}, {}, "use_prefix_tuning is True; only prompt tokens with False are"),
        ({"aggregation_type": "weighted"}, {}, "aggregation_type is 'weighted'"),
        ({"num_exits": 2}, {}, "num_exits is 2"),
        ({"vt_attention_type": "encoder"}, {}, "vt_attention_type is 'encoder'"),
        ({"num_special_tokens": 2}, {}, "num_special_tokens is 2, for which no trees were published"),
        ({"num_special_tokens": 2}, {"trees": SMALL}, "num_special_tokens is 2, and the trees are of 3 states"),
        ({"num_special_tokens": 1}, {}, r"prompt_embeddings has shape \[3, 64\], expected \[1, 64\]"),
        ({"frob": 1}, {}, "unknown flag 'frob'"),
    ],
)
def test_prompt_tokens_that_are_not_served_are_named(change, chosen, message, tmp_path):
    prompts(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path, "ppd", PPD, toy(), **chosen)


def test_prompt_tokens_of_another_target_are_refused(tmp_path):
    prompts(tmp_path)
    save_file({"prompt_embeddings": np.zeros((3, 128), np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="128 wide and 'toy' 64"):
        read_head(tmp_path, "ppd", PPD, toy())


def kangaroo(folder, **more):
    """An `AdapterModel`'s state: a LlamaConfig of one layer, an attention between two norms; always rope of base 10000."""
    shapes = {name: shape for name, shape in decoder_layer("layers.0", E).items() if ".self_attn." in name}
    tensors = draw(9, {**shapes, "layers.0.input_layernorm.weight": (E,), "norm.weight": (E,)}, np.float32)
    return write(folder, llama(architectures=["LlamaForCausalLM"], rope_theta=500000.0, **more), tensors), tensors


def test_an_adapter_is_read(tmp_path):
    folder, tensors = kangaroo(tmp_path)
    assert drafter_of(folder) == "kangaroo"
    head = read_head(folder, "kangaroo", Kangaroo, toy())
    assert head.drafter.exit_layer == 2 and "exit_layer=N sets it" in head.notes[0]
    assert read_head(folder, "kangaroo", Kangaroo, toy(), exit_layer=1).drafter.exit_layer == 1
    x = np.random.default_rng(0).standard_normal((5, E))
    block = Block(jnp.zeros((1, 5), jnp.int32), jnp.arange(5)[None], jnp.zeros((1,), jnp.int32))
    got, _ = adapter.adapt(head.drafter.config, head.params, jnp.asarray(x[None], jnp.float32), block, None)
    np.testing.assert_allclose(got[0], adapted(tensors, x), rtol=1e-4, atol=1e-4)


def adapted(tensors, x):
    """The adapter in float64."""
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    norm = lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    y = norm(x, t["layers.0.input_layernorm.weight"])
    q, k, v = ((y @ t[f"layers.0.self_attn.{n}_proj.weight"].T).reshape(len(x), -1, 8) for n in "qkv")
    angle = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(0, 8, 2) / 8)
    c, s = np.cos(angle), np.sin(angle)
    turned = lambda x: np.concatenate([x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s], -1)
    scores = np.einsum("qhd,khd->hqk", turned(q), np.repeat(turned(k), 2, axis=1)) / np.sqrt(8)
    weight = np.exp(scores) * np.tri(len(x))
    out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), np.repeat(v, 2, axis=1))
    h = x + out.reshape(len(x), -1) @ t["layers.0.self_attn.o_proj.weight"].T
    return norm(h, t["norm.weight"])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; only adapters of one are read"),
        ({"hidden_size": 32}, "32 wide and 'toy' 64: it belongs to another target"),
        ({"vocab_size": 99}, "reads 99 tokens, 'toy' has 96"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(change, message, tmp_path):
    folder, tensors = kangaroo(tmp_path)
    write(folder, {**json.loads((folder / "config.json").read_text()), **change}, tensors)
    with pytest.raises(ModelError, match=message):
        read_head(folder, "kangaroo", Kangaroo, toy())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppd", "kangaroo", "medusa"])
def test_they_run(name, tmp_path):
    if name == "ppd":
        prompts(tmp_path)
        head = read_head(tmp_path, name, PPD, toy(), trees=SMALL)
    elif name == "kangaroo":
        head = read_head(kangaroo(tmp_path)[0], name, Kangaroo, toy(), length=2, threshold=0.0)
    else:
        medusa2(tmp_path)
        head = read_head(tmp_path, name, Medusa, toy())
    drafter = dataclasses.replace(head.drafter)
    got, _ = complete(drafter, model={"target": toy().params, "draft": head.params})
    same(got, plain())


def test_a_torch_file_of_prompt_tokens_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    table = prompts(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"prompt_embeddings": torch.from_numpy(table).bfloat16()}, tmp_path / "adapter_model.bin")
    head = read_head(tmp_path, "ppd", PPD, toy(), trees=SMALL)
    np.testing.assert_array_equal(head.params["embeddings"][:, 0], table.astype(BF16).astype(np.float32))


KNOWN = {
    "of its own field": ({"medusa_num_heads": 2}, "medusa"),
    "of its own field, beside another's name": ({"num_anchors": 4, "architectures": ["DSparkDraftModel"]}, "dflash"),
    "of a rank": ({"num_anchors": 4, "markov_rank": 8, "architectures": ["DFlashDraftModel"]}, "dspark"),
    "of a rank in the nested fields": ({"dflash_config": {"markov_rank": 8}}, "dspark"),
    "of a causal head": ({"dflash_config": {"causal_head": True}, "architectures": ["DFlashDraftModel"]}, "jetspec"),
    "of convolutions": (
        {"dflash_config": {"conv_kernel_size": 2}, "architectures": ["DFlashDraftModel"]},
        "dflash2",
    ),
    "by its class, which has another's name in it": (
        {"architectures": ["DFlash2DraftModel"], "num_anchors": 4},
        "dflash2",
    ),
    "of a projector": (
        {"dflash_config": {"projector_type": "domino"}, "architectures": ["DFlashDraftModel"]},
        "domino",
    ),
    "by its name, beside what EAGLE-3 has too": ({"speculators_model_type": "peagle", "draft_vocab_size": 4}, "peagle"),
    "by its class": ({"architectures": ["Gemma4AssistantForCausalLM"]}, "gemma4_assistant"),
    "by its class, beside a target's field": ({"architectures": ["Qwen3MTP"], "num_mtp_layers": 1}, "mtp"),
    "by what a target's file does not have": ({"draft_vocab_size": 4, "num_nextn_predict_layers": 1}, "eagle3"),
    "in a target's folder": ({"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}, "mtp"),
    "of a kind that nobody knows": ({"speculators_model_type": "frob"}, "eagle3"),
}


@pytest.mark.parametrize(("config", "wanted"), KNOWN.values(), ids=KNOWN)
def test_the_drafter_that_a_config_is_surest_of(tmp_path, config, wanted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafter_of(tmp_path) == wanted


def test_the_drafter_by_the_names_of_tensors(tmp_path):
    """What has the names of two kinds is of the one that has more of its own."""
    layer = "layers.0.self_attn.q_proj.weight"
    known = {
        "eagle1": ("fc.weight", layer, "layers.0.mlp.up_proj.weight"),
        "fspad": ("fc.fc.weight", "fc.mlp.gate_proj.weight", "fc.mlp.up_proj.weight", layer),
        "griffin": ("fc.fc.weight", "fc.mlp.input_layernorm.weight", "fc.mlp.up_proj.weight", layer),
        "dovetail": ("input_layernorm.weight", "W_1", "W_2", "W_z", layer, "layers.0.mlp.up_proj.weight"),
        "falcon": ("lstm.weight_ih_l0", layer, "layers.0.mlp.up_proj.weight"),
        "gumiho": ("fc.weight", layer, "layers.0.mlp.up_proj.weight", "mlp.0.0.linear.weight"),
        "eagle3": ("fc.weight", "midlayer.hidden_norm.weight"),
        "clover2": (layer, "layers.0.mlp.up_proj.weight", "clover_norm.weight"),
        "medusa": ("0.0.linear.weight",),
        "kangaroo": (layer, "norm.weight"),
    }
    (tmp_path / "config.json").write_text("{}")
    for name, tensors in known.items():
        save_file({tensor: np.zeros((1,), np.float32) for tensor in tensors}, tmp_path / "model.safetensors")
        assert drafter_of(tmp_path) == name
    save_file({"frob.weight": np.zeros((1,), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="does not say which drafter it is for: give a line"):
        drafter_of(tmp_path)
