"""LLaDA 2 folders, written by their own rules, against transformers' GLM-4.5, whose layers compute the same; and bad input.

Blocks that choose experts (LLaDA 2.2) are a loop over blocks in place of the router's groups.
"""

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_experts import blocks, decoded, edited, ours, theirs

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.models import LlamaLM, Masked, ModelError, llama_config, tensors
from specjax.models.families import base
from specjax.serve.sampling import Sampling
from specjax.sharding import make_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

V, MASK, BLOCK = 48, 47, 4
CONFIG = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": V, "hidden_size": 32,
    "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 600.0, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu", "norm_topk_prob": True,
    "score_function": "sigmoid", "router_dtype": "fp32", "rotary_dim": 4, "sliding_window": 4096, "use_sliding_window": False,
    "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0, "mask_token_id": MASK, "block_size": BLOCK,
}  # fmt: skip
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor",
    "first_k_dense_replace", "use_qk_norm", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "norm_topk_prob",
)  # fmt: skip
NAMES = {
    "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, V, (2, 12))
BLOCKS = blocks(12, BLOCK)


def renamed(state):
    """GLM's parameters as LLaDA 2 names and shapes them: q, k and v as rows of one matrix, a tensor for each expert."""
    stored = {}
    for name, x in state.items():
        at, _, last = name.rpartition(".")
        layer = at.partition(".self_attn")[0]
        if at.endswith("q_proj"):
            rows = [state[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
            stored[f"{layer}.attention.query_key_value.weight"] = np.concatenate(rows)
        elif name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(np.split(both, 2) for both in x):
                stored |= {f"{at}.{i}.gate_proj.weight": gate, f"{at}.{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stored |= {f"{at}.{i}.down_proj.weight": down for i, down in enumerate(x)}
        elif last == "e_score_correction_bias":
            stored[f"{at}.expert_bias"] = x
        elif not at.endswith(("k_proj", "v_proj")):
            for old, new in NAMES.items():
                name = name.replace(old, new)
            stored[name] = x
    return {name: np.ascontiguousarray(x) for name, x in stored.items()}


@pytest.fixture(scope="module")
def llada2(tmp_path_factory):
    torch.manual_seed(0)
    own = {name: CONFIG[name] for name in SAME}
    rope = {"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 0.5}
    config = transformers.Glm4MoeConfig(
        **own, n_routed_experts=8, n_shared_experts=2, rope_parameters=rope, attention_bias=False, initializer_range=0.3,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Glm4MoeForCausalLM(config).eval()
    with torch.no_grad():
        for x in (*model.parameters(), *(x for name, x in model.named_buffers() if name.endswith("correction_bias"))):
            x += 0.2 * torch.randn_like(x)
    folder = tmp_path_factory.mktemp("llada2") / "llada2"
    folder.mkdir()
    safetensors.save_file(
        renamed({name: x.numpy() for name, x in model.state_dict().items()}), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return model, folder


@pytest.fixture(scope="module")
def model(llada2):
    return models.load(llada2[1], dtype="float32")


def test_logits_are_those_of_the_same_layers(llada2, model):
    assert model.masked == Masked(MASK, shift=False, block=BLOCK) and tuple(base.sparse_layers(model.lm.config)) == (
        False,
        True,
        True,
    )
    want = theirs(llada2[0], IDS, BLOCKS)
    assert want.std() > 1
    np.testing.assert_allclose(ours(model, IDS, BLOCKS), want, atol=1e-4)
    unbiased = jax.tree.map_with_path(lambda path, x: 0 * x if path[-1].key == "bias" else x, model.params)
    other = ours(models.Model(model.lm, unbiased), IDS, BLOCKS)
    assert np.abs(other - want).max() > 0.1  # the bias of experts decides something


@pytest.mark.slow
def test_it_decodes_as_whole_passes_of_the_same_layers(llada2, model):
    """A token per pass, with the block cache, against passes over the whole text without one."""
    prompt = IDS[0, :6].tolist()
    (record,) = specjax.generate(
        model, [prompt], max_new_tokens=6, sampling=Sampling(ignore_eos=True), decode=Diffusion(unmask="fixed")
    )
    assert record.tokens == decoded(llada2[0], prompt, 6, BLOCK, MASK)


def test_a_folder_gives_back_what_was_saved(llada2, model, tmp_path):
    models.save(tmp_path / "again", model.lm, model.params, diffusion=model.masked)
    was, is_now = tensors.read_folder(llada2[1]), tensors.read_folder(tmp_path / "again")
    assert {name: x.shape for name, x in was.items()} == {name: x.shape for name, x in is_now.items()}
    assert all(np.array_equal(x.array(), is_now[name].array()) for name, x in was.items())
    again = models.load(tmp_path / "again", dtype="float32")
    assert (again.lm, again.masked) == (model.lm, model.masked)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    kept = CONFIG.keys() & config.keys()
    assert len(kept) > 25 and {name: config[name] for name in kept} == {name: CONFIG[name] for name in kept}


def by_blocks(gate, capacity, x):
    """The router's result for rows `[B, T, E]` of which each token chooses within its block, in loops."""
    logits = torch.einsum("bte,xe->btx", x.float(), gate.weight.float())
    scores = logits.sigmoid()
    ranked = scores + gate.e_score_correction_bias
    weights, experts = [], []
    for row in range(len(x)):
        for begin in range(0, x.shape[1], BLOCK):
            best = ranked[row, begin : begin + BLOCK].max(dim=0).values
            allowed = sorted(range(len(best)), key=lambda i: -float(best[i]))[:capacity]
            for t in range(begin, min(begin + BLOCK, x.shape[1])):
                own = sorted(allowed, key=lambda i: -float(ranked[row, t, i]))[: gate.top_k]
                taken = scores[row, t, own]
                weights.append(taken / taken.sum() * gate.routed_scaling_factor)
                experts.append(torch.tensor(own))
    return logits.reshape(-1, logits.shape[-1]), torch.stack(weights), torch.stack(experts)


@pytest.fixture(scope="module", params=(4, 8))
def choosing(request, llada2, tmp_path_factory):
    """The same folder with `expert_capacity`, and transformers' model with that router."""
    edits = {"delete_token_id": 5, "split_token_id": 0}
    folder = edited(llada2[1], tmp_path_factory.mktemp("llada2.2") / "model", expert_capacity=request.param, **edits)
    other = copy.deepcopy(llada2[0])
    for layer in other.model.layers[1:]:
        layer.mlp.gate.forward = functools.partial(by_blocks, layer.mlp.gate, request.param)
    return other, folder


def test_logits_where_blocks_choose_experts(choosing, model):
    """With all experts as capacity, a token's choice is plain, and not the groups'."""
    own = models.load(choosing[1], dtype="float32")
    assert own.lm.whole_blocks == BLOCK and own.lm.config.experts.choices == own.lm.config.experts.capacity
    want = theirs(choosing[0], IDS, BLOCKS)
    np.testing.assert_allclose(ours(own, IDS, BLOCKS), want, atol=1e-4)
    assert np.abs(ours(model, IDS, BLOCKS) - want).max() > 1  # without the field everything differs


def test_it_is_written_with_its_capacity(choosing, tmp_path):
    own = models.load(choosing[1], dtype="float32")
    models.save(tmp_path / "again", own.lm, own.params, diffusion=own.masked)
    again = models.load(tmp_path / "again", dtype="float32")
    assert (again.lm, again.masked) == (own.lm, own.masked)
    assert (again.masked.delete_id, again.masked.split_id) == (5, 0)
    with pytest.raises(ModelError, match="in blocks of 4, and the model has blocks of 8"):
        models.save(tmp_path / "longer", own.lm, own.params, diffusion=dataclasses.replace(own.masked, block=8))
    with pytest.raises(ModelError, match="no supported architecture"):
        models.save(tmp_path / "layers", own.lm, own.params)


def test_devices_read_their_part_of_joined_rows(llada2, model):
    split = models.load(llada2[1], dtype="float32", mesh=make_mesh("data=1,model=4", jax.devices()[:4]))
    (attention, mlp), (own_attention, own_mlp) = (
        (of.params["layers"][1]["attention"], of.params["layers"][1]["mlp"]) for of in (split, model)
    )
    assert attention["q"]["kernel"].addressable_shards[0].data.shape == (32, 8)
    np.testing.assert_array_equal(attention["q"]["kernel"], own_attention["q"]["kernel"])
    np.testing.assert_array_equal(mlp["shared"]["up"]["kernel"], own_mlp["shared"]["up"]["kernel"])
    assert split.lm.kv_copies == 2  # two kv-heads on four devices
    for name in "kv":
        np.testing.assert_array_equal(attention[name]["kernel"][:, 16:24], own_attention[name]["kernel"][:, 8:])


def test_the_bias_of_experts_stays_float32(llada2, model):
    half = models.load(llada2[1], dtype="bfloat16").params["layers"][2]["mlp"]["router"]
    assert half["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(half["bias"], model.params["layers"][2]["mlp"]["router"]["bias"])


def test_the_published_size():
    """LLaDA2.0-mini's fields; 16B is its name's. Mask and blocks are those of the published code."""
    shape = models.abstract("inclusionAI/LLaDA2.0-mini")
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shape.params)) // 10**9 == 16
    assert shape.masked == Masked(156895, shift=False, block=32) and shape.lm.config.near.rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    (
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported; LLaDA 2 has 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"expert_capacity": 2}, r"expert_capacity 2 must be .* from 3 \(num_experts_per_tok\) to 8 \(num_experts\)"),
        ({"expert_capacity": 9}, "expert_capacity 9 must be the number of experts that a block chooses"),
        ({"expert_capacity": -4}, "expert_capacity -4 must be"),
        ({"expert_capacity": "4"}, "expert_capacity '4' must be"),
        (
            {"delete_token_id": 3},
            "needs delete_token_id and split_token_id, two ids besides .* 47, or neither; got 3 and None",
        ),
        ({"delete_token_id": 3, "split_token_id": 3}, "two ids besides the mask's 47, or neither; got 3 and 3"),
        ({"delete_token_id": 3, "split_token_id": MASK}, "two ids besides the mask's"),
        ({"delete_token_id": 3, "split_token_id": -1}, "or neither; got 3 and -1"),
        ({"delete_token_id": 3, "split_token_id": 60}, "split_token_id 60 is outside the vocabulary of 48 tokens"),
        ({"n_group": 3}, "8 experts do not form 3 groups"),
        ({"n_group": 8}, "8 experts do not form 8 groups of two or more"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"topk_group": 1}, "num_experts_per_tok 3 is above 2, the experts to choose from"),
        ({"n_group": None}, "positive integers for: n_group"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a share of a head, not 1.5"),
        ({"partial_rotary_factor": 0.4}, "rotates 3 channels, which must be an even number"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor must be a positive number, not 'x'"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace 3 leaves no layer with experts"),
        ({"num_shared_experts": -1}, "whole numbers for: num_shared_experts"),
        (
            {"num_shared_experts": 1},
            r"shared_experts.gate_proj.weight has shape \[24, 32\], config.json says \[12, 32\]",
        ),
        ({"num_key_value_heads": 4}, r"query_key_value.weight has shape \[64, 32\], config.json says \[96, 32\]"),
        ({"use_bias": True}, r"missing model.layers.0.attention.dense.bias \[32\]"),
        ({"first_k_dense_replace": 0}, r"missing model.layers.0.mlp.experts.0.down_proj.weight"),
        ({"num_experts": 12}, r"missing model.layers.1.mlp.experts.8.gate_proj.weight"),
        ({"block_size": 0}, "needs a block_size of at least 1, got 0"),
    ),
)
def test_a_bad_folder_is_one_clear_error(llada2, tmp_path, changes, said):
    with pytest.raises(ModelError, match=said):
        models.load(edited(llada2[1], tmp_path / "spoilt", **changes), dtype="float32")


def test_it_is_saved_as_what_it_is(model, tmp_path):
    with pytest.raises(ModelError, match="written as LLaDA 2, with blocks and no shift"):
        models.save(tmp_path / "x", model.lm, model.params, diffusion=Masked(1, shift=False))
    llama = LlamaLM(llama_config(48, 32, 40, 1, 4, 2, 8))
    with pytest.raises(ModelError, match="tokens that delete and split are written as LLaDA 2"):
        models.save(
            tmp_path / "y",
            llama,
            llama.init(jax.random.key(0)),
            diffusion=Masked(1, shift=False, delete_id=2, split_id=3),
        )
    models.save(tmp_path / "layers", model.lm, model.params)  # read from left to right, they are GLM-4.5's
    assert json.loads((tmp_path / "layers" / "config.json").read_text())["architectures"] == ["Glm4MoeForCausalLM"]
