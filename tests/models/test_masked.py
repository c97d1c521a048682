"""LLaDA and Dream folders: names, config fields, what is refused, and logits in transformers without the causal mask."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import changed

from specjax import models
from specjax.decode import Diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, ModelError, llama_config, masked, tensors, weights

LLADA = llama_config(24, 16, 20, 2, 2, 2, 8, max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=5e5)
DREAM = changed(LLADA, num_key_value_heads=1, rms_norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)


def random_params(lm, seed=0):
    """Every leaf differs, biases and norms too."""
    leaves, tree = jax.tree.flatten(lm.init(jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(
        tree, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def saved(path, config, shift):
    lm = LlamaLM(config)
    models.save(path, lm, random_params(lm), eos_ids=(3,), diffusion=Masked(23, shift))
    return path


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("masked") / "llada", LLADA, shift=False)


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("masked") / "dream", DREAM, shift=True)


@pytest.fixture(params=("llada", "dream"))
def folder(request):
    return request.getfixturevalue(request.param)


def edit(path, **changes):
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v != "drop"}))
    return path


def test_a_folder_gives_back_what_was_saved(folder):
    model = models.load(folder, dtype="float32")
    want = random_params(model.lm)
    assert model.masked == Masked(23, folder.name == "dream") and model.eos_ids == (3,)
    assert model.lm.config == (DREAM if folder.name == "dream" else LLADA)
    chex.assert_trees_all_equal(model.params, want)


def test_names_are_the_published_ones(folder):
    names, config = set(tensors.read_folder(folder)), json.loads((folder / "config.json").read_text())
    if folder.name == "dream":
        assert config["architectures"] == ["DreamModel"] and config["model_type"] == "Dream"
        assert {
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.1.mlp.down_proj.weight",
            "lm_head.weight",
        } <= names
        return
    assert config["architectures"] == ["LLaDAModelLM"] and config["d_model"] == 16 and config["mlp_hidden_size"] == 20
    layer = ("attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
    assert names == {f"model.transformer.{part}.weight" for part in ("wte", "ln_f", "ff_out")} | {
        f"model.transformer.blocks.{i}.{part}.weight" for i in range(2) for part in layer
    }


def test_llada_under_llamas_names_is_read_too(llada, tmp_path):
    renamed = shutil.copytree(llada, tmp_path / "renamed")
    model = models.load(llada, dtype="float32")
    weights.write(renamed / "model.safetensors", model.params, None)
    again = models.load(renamed, dtype="float32")
    assert all(map(np.array_equal, jax.tree.leaves(model.params), jax.tree.leaves(again.params)))


def test_the_8b_config_has_its_published_size():
    """The card's count of parameters, from the fields of the hub's config."""
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32,
        "n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464, "mask_token_id": 126336,
        "max_sequence_length": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "weight_tying": False, "rope": True,
        "alibi": False, "block_type": "llama", "activation_type": "silu", "include_bias": False, "include_qkv_bias": False,
        "layer_norm_type": "rms", "scale_logits": False, "attention_layer_norm": False, "eos_token_id": 126081,
    }  # fmt: skip
    shape, how = masked.from_hf(config)
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(LlamaLM(shape).abstract()))
    assert count == 8_015_581_184 and how == Masked(126336, False)


def test_dreams_config_has_its_published_size():
    config = {
        "architectures": ["DreamModel"], "model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "mask_token_id": 151666,
        "hidden_act": "silu", "rope_scaling": None,
    }  # fmt: skip
    shape, how = masked.from_hf(config)
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(LlamaLM(shape).abstract()))
    assert count == 7_615_616_512 and how == Masked(151666, True)


def test_logits_are_those_of_transformers_without_the_causal_mask(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = models.load(folder, dtype="float32")
    c = model.lm.config
    kinds = {"llada": ("LlamaConfig", "LlamaForCausalLM"), "dream": ("Qwen2Config", "Qwen2ForCausalLM")}
    config, kind = (getattr(transformers, name) for name in kinds[folder.name])
    theirs = kind(
        config(
            vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=c.near.num_key_value_heads, max_position_embeddings=32, rms_norm_eps=c.norm.eps,
            rope_theta=c.rope.theta, tie_word_embeddings=False, head_dim=8, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    state = {weights.hf_name(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(model.params)}
    theirs.load_state_dict({name: torch.tensor(x.T if turned else x) for (name, turned), x in state.items()})
    ids = np.random.default_rng(0).integers(0, 24, (1, 9))
    everything = torch.zeros(1, 1, 9, 9)  # an additive mask that hides nothing
    with torch.no_grad():
        want = theirs(torch.tensor(ids), attention_mask=everything).logits.numpy()
    block = Block(jnp.asarray(ids), jnp.arange(9)[None], jnp.zeros(1, jnp.int32), causal=False)
    got = model.lm(model.params, block, None, wants=Wants(logits=True)).logits
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"mask_token_id": "drop"}, "needs a mask_token_id, got None"),
        ({"mask_token_id": 24}, "outside the vocabulary of 24"),
        ({"block_type": "sequential"}, "block_type 'sequential' is not supported"),
        ({"alibi": True}, "alibi True"),
        ({"n_layers": "drop"}, "num_hidden_layers"),
        ({"mlp_hidden_size": 21}, r"ff_proj.weight has shape \[20, 16\], config.json says \[21, 16\]"),
    ),
)
def test_a_bad_llada_folder_is_one_clear_error(llada, tmp_path, change, said):
    with pytest.raises(ModelError, match=said):
        models.load(edit(shutil.copytree(llada, tmp_path / "spoilt"), **change), dtype="float32")


@pytest.mark.parametrize(
    ("config", "shift", "said"),
    (
        (LLADA, True, "written as Dream"),
        (
            changed(LLADA, sliding_window=8),
            False,
            "as A2D, which has layers of Llama, Qwen2 or Qwen3 without a",
        ),
    ),
)
def test_what_no_layout_expresses_is_not_saved(tmp_path, config, shift, said):
    with pytest.raises(ModelError, match=said):
        models.save(tmp_path / "x", LlamaLM(config), random_params(LlamaLM(config)), diffusion=Masked(1, shift))


def test_the_policies_of_generation_config_are_those_that_decode(tmp_path, llada):
    """Of a folder that names some, where the user names none; his own go before them."""
    lm = LlamaLM(LLADA)
    line, how = "threshold:threshold=0.97", Masked(23, False, unmask="threshold:threshold=0.97", cache="none")
    models.save(tmp_path / "own", lm, random_params(lm), diffusion=how)
    own, usual = models.load(tmp_path / "own", dtype="float32"), models.load(llada, dtype="float32")
    assert own.masked == how
    decoded = lambda model, **own: Diffusion(**own).bind(model)[0].policy
    assert decoded(own) == decoded(usual, unmask=line) != decoded(usual) == decoded(own, unmask="threshold")
    kept = lambda model, **own: Diffusion(**own).bind(model)[0].cache
    assert kept(own) == kept(usual, cache="none") != kept(usual) == kept(own, cache="prefix")
    (tmp_path / "own" / "generation_config.json").write_text('{"unmask": 3}')
    with pytest.raises(ModelError, match="generation_config.json: unmask must be the line of a policy, not 3"):
        models.load(tmp_path / "own")
