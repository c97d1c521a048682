"""A2D folders, as the dLLM project's converter writes them: logits, where the mask is named, and the way back to a folder."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from specjax import models
from specjax.lm import Block, Wants
from specjax.models import Masked, ModelError, tensors
from specjax.serve.engine import Engine

MASK = 3
KINDS = {"llama3": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""By family of the references, the name in the architecture. Qwen2's has layers with a window, which A2D does not heed."""


def tokenizer(**special):
    words = {"a": 0, "b": 1, "<unk>": 2, "<|mask|>": MASK}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def converted(reference, folder, **changes):
    """The reference's folder with the fields that make it an A2D model, and without a tokenizer."""
    kind = KINDS[reference.name]
    shutil.copytree(reference.folder, folder)
    code = f"modeling_{kind.lower()}.A2D{kind}"  # as on the hub, whose folders bring their own code along
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": f"a2d-{kind.lower()}",
        "architectures": [f"A2D{kind}LMHeadModel"],
        "auto_map": {"AutoConfig": f"{code}Config", "AutoModelForMaskedLM": f"{code}LMHeadModel"},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_transformers_with_everything_visible(references, name, tmp_path):
    reference = references(name)
    folder = converted(reference, tmp_path / "a2d")
    tokenizer(mask_token="<|mask|>").save_pretrained(folder)
    model = models.load(folder, dtype="float32")
    assert model.masked == Masked(MASK, shift=False)
    ids = np.random.default_rng(0).integers(0, 128, (1, 12))
    with torch.no_grad():
        want = reference.torch(torch.as_tensor(ids), attention_mask=torch.zeros(1, 1, 12, 12)).logits.numpy()
    block = Block(jnp.asarray(ids), jnp.arange(12)[None], jnp.zeros(1, jnp.int32), causal=False)
    got = model.lm(model.params, block, None, wants=Wants(logits=True)).logits
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.abs(want - reference.logits(ids)).max() > 0.1  # the causal model says something else

    models.save(tmp_path / "again", model.lm, model.params, tokenizer=model.tokenizer, diffusion=model.masked)
    again = models.load(tmp_path / "again", dtype="float32")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["architectures"], config["mask_token_id"]) == ([f"A2D{KINDS[name]}LMHeadModel"], MASK)
    assert set(tensors.read_folder(tmp_path / "again")) == set(tensors.read_folder(folder))
    assert (again.masked, again.lm.config) == (model.masked, model.lm.config)
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params)))


def test_config_names_the_mask_before_the_tokenizer(references, tmp_path):
    folder = converted(references("qwen3"), tmp_path / "a2d", mask_token_id=7)
    assert models.load(folder, dtype="float32").masked.mask_id == 7
    tokenizer(mask_token="<|mask|>").save_pretrained(folder)
    assert models.load(folder, dtype="float32").masked.mask_id == 7


def test_a_folder_that_names_no_mask_is_one_clear_error(references, tmp_path):
    folder = converted(references("qwen3"), tmp_path / "a2d")
    said = "needs a mask_token_id, or a tokenizer with a mask_token beside it, got None"
    with pytest.raises(ModelError, match=said):
        models.load(folder)
    tokenizer().save_pretrained(folder)
    with pytest.raises(ModelError, match=said):
        models.load(folder)
    assert models.abstract(folder).masked == Masked(0, shift=False)  # to plan with


def test_blocks_are_said_in_the_config(references, tmp_path):
    folder = converted(references("llama3"), tmp_path / "a2d", mask_token_id=MASK, block_size=4)
    model = models.load(folder, dtype="float32")
    decoder = Engine(model).decoder
    assert model.masked == Masked(MASK, shift=False, block=4, align="prompt_end")
    assert (type(decoder).__name__, decoder.block_length, decoder.align) == ("BlockDiffusion", 4, "prompt_end")
    assert not decoder.warped
    for how in (model.masked, Masked(MASK, shift=False, block=4)):
        models.save(tmp_path / f"again-{how.align}", model.lm, model.params, diffusion=how)
        assert models.load(tmp_path / f"again-{how.align}").masked == how
    with pytest.raises(ModelError, match="block_align must be text or prompt_end, got 'left'"):
        models.load(
            converted(references("llama3"), tmp_path / "odd", mask_token_id=MASK, block_size=4, block_align="left")
        )
    with pytest.raises(ModelError, match="needs a block_size of at least 1, got -1"):
        models.load(converted(references("llama3"), tmp_path / "bad", mask_token_id=MASK, block_size=-1))


def test_the_published_size():
    """Qwen3-0.6B's fields, which conversion keeps, and the card's count of parameters."""
    config = {
        "architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        "hidden_act": "silu", "layer_types": ["full_attention"] * 28, "max_window_layers": 28, "rope_scaling": None,
    }  # fmt: skip
    shape, how = models.masked.from_hf(config, lambda: 151669)
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(models.LlamaLM(shape).abstract()))
    assert count == 596_049_920 and how == Masked(151669, shift=False)
