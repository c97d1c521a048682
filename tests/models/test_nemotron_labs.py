"""Nemotron-Labs-Diffusion folders against transformers' Ministral 3: both modes, the way back to a folder, and bad input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import models
from specjax.decode import Diffusion, Plain
from specjax.lm import Block, Wants
from specjax.models import Masked, ModelError, tensors
from specjax.serve.engine import Engine

safetensors = pytest.importorskip("safetensors.numpy")

V, MASK, BLOCK, PERIOD = 48, 47, 4, 6
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": PERIOD, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
    },
}  # fmt: skip
CONFIG = SHAPE | {
    "architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion", "mask_token_id": MASK,
    "block_size": BLOCK, "dlm_paradigm": "bidirectional", "dlm_loss_weight": None, "ar_loss_weight": 1.0,
    "dp_varying_mask_ratio": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "eos_token_id": None, "bos_token_id": 1, "auto_map": {"AutoModel": "modeling_nemotron_labs_diffusion.Model"},
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, V, (2, 20))
KNOWN = 14


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder in the published layout, and transformers' model with its weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**SHAPE, pad_token_id=None)).eval()
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn_like(value) * 0.3 + (value.dim() == 1))
    rename = lambda name: name.replace("model.", "encoder.").replace("lm_head.", "diffusion_head.")
    folder = tmp_path_factory.mktemp("nemotron")
    safetensors.save_file(
        {rename(name): x.numpy() for name, x in made.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder, made


def seen(made, visible):
    """Transformers' logits of `IDS` under a mask `[T, T]`."""
    import torch

    mask = torch.where(torch.as_tensor(visible), 0.0, -torch.inf)[None, None].expand(2, -1, -1, -1)
    with torch.no_grad():
        return made(torch.as_tensor(IDS), attention_mask=mask).logits.numpy()


@pytest.mark.slow
def test_both_modes_are_ministrals_under_their_masks(published):
    """Known tokens are read causally and stored; a block after them sees itself whole. Queries grow from position 6 on."""
    folder, made = published
    model = models.load(folder, dtype="float32")
    assert (
        model.dual == Masked(MASK, shift=False, block=BLOCK, align="prompt_end", causal_context=True)
        and model.masked is None
    )
    causal = np.tril(np.ones((20, 20), bool))
    wants, at = Wants(logits=True), jnp.arange(20)[None]
    part = lambda cut, length, **how: Block(jnp.asarray(IDS[:, cut]), at[:, cut], jnp.full(2, length), **how)
    whole = model.lm(model.params, part(slice(0, 20), 0), None, wants=wants)
    np.testing.assert_allclose(whole.logits, seen(made, causal), atol=2e-4)

    cache = model.lm.init_cache(2, 24, jnp.float32)
    read = model.lm(model.params, part(slice(0, KNOWN), 0), cache, wants=Wants())
    cache = model.lm.commit(cache, read.delta, None, jnp.zeros(2, jnp.int32))
    own = model.lm(model.params, part(slice(KNOWN, 20), KNOWN, causal=False), cache, wants=wants).logits
    causal[KNOWN:, KNOWN:] = True
    want = seen(made, causal)
    np.testing.assert_allclose(own, want[:, KNOWN:], atol=2e-4)
    assert np.abs(want - np.asarray(whole.logits)).max() > 0.1


@pytest.mark.slow
def test_it_decodes_as_an_autoregressive_model_and_is_written_again(published, tmp_path):
    folder, made = published
    model = models.load(folder, dtype="float32")
    assert isinstance(Engine(model, "plain").decode, Plain)
    text, prompt = IDS[0, :5].tolist(), IDS[0, :5].tolist()
    for _ in range(8):
        text.append(int(made(__import__("torch").as_tensor([text])).logits[0, -1].argmax()))
    for decode in ("plain", "prompt_lookup:length=2"):
        (got,) = specjax.generate(model, [prompt], decode=decode, max_new_tokens=8)
        assert list(got.tokens) == text[5:]

    models.save(tmp_path / "again", model.lm, model.params, diffusion=model.dual)
    again, config = models.load(tmp_path / "again"), json.loads((tmp_path / "again" / "config.json").read_text())
    assert (again.dual, again.lm.config) == (model.dual, model.lm.config)
    assert {name: config[name] for name in ("architectures", "model_type", "mask_token_id", "block_size")} == {
        name: CONFIG[name] for name in ("architectures", "model_type", "mask_token_id", "block_size")
    }
    assert set(tensors.read_folder(tmp_path / "again")) == set(tensors.read_folder(folder))
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "dlm_paradigm",
            "autoregressive",
            "dlm_paradigm 'autoregressive' is not supported; Nemotron-Labs-Diffusion has",
        ),
        ("dlm_type", "dream", "dlm_type 'dream' is not supported"),
        ("mlp_bias", True, "mlp_bias True is not supported"),
        ("mask_token_id", V, f"mask_token_id {V} is outside the vocabulary of {V} tokens"),
        ("block_size", 0, "needs a block_size of at least 1, got 0"),
        ("expert_capacity", 4, "expert_capacity"),
        ("hidden_act", "gelu", "hidden_act"),
    ],
)
def test_what_the_loader_does_not_know_is_refused(field, value, said):
    with pytest.raises(ModelError, match=said):
        models.masked.from_hf(CONFIG | {field: value})


def test_the_published_sizes():
    """The 8B's fields, of which a file may leave out the mask and the block; and how its queries grow."""
    large = {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    }  # fmt: skip
    rope = SHAPE["rope_parameters"] | {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
    left_out = ("mask_token_id", "block_size")
    config = {name: value for name, value in CONFIG.items() if name not in left_out}
    shape, how = models.masked.from_hf(config | large | {"rope_parameters": rope})
    assert how == Masked(100, shift=False, block=32, align="prompt_end", causal_context=True) and not how.warped
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(models.LlamaLM(shape).abstract()))
    assert count == 8_489_553_920
    grown = shape.near.query_scale.at(jnp.asarray([0, 16383, 16384, 49152, 131072]))
    np.testing.assert_allclose(grown, [1, 1, 1.0693, 1.1386, 1.2197], atol=1e-4)


def test_any_family_may_be_of_both_kinds(tmp_path):
    """Its folder is its own family's with two more fields, which are checked."""
    llama = models.LlamaLM(models.llama_config(V, 32, 40, 1, 4, 2, 8))
    how = Masked(MASK, shift=False, block=BLOCK, align="prompt_end", causal_context=True)
    models.save(tmp_path, llama, llama.init(jax.random.key(0)), diffusion=how)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["self_diffusion_mask"], config["self_diffusion_block"]) == (
        "llama",
        MASK,
        BLOCK,
    )
    again = models.load(tmp_path)
    assert (again.dual, again.masked, again.lm.config.layers) == (how, None, llama.config.layers)
    for field, value in (("self_diffusion_mask", V), ("self_diffusion_block", 0), ("self_diffusion_block", None)):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ModelError, match="must be a token of the model and the length of a block, not"):
            models.load(tmp_path)


def test_the_mode_of_a_way():
    model = models.Model(None, None, dual=Masked(MASK, shift=False, causal_context=True))
    assert Diffusion().mode(model).masked == model.dual and Plain().mode(model) is model
