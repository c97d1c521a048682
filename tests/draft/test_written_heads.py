"""Heads made here and written as other engines read them: the files' own rules, and the same drafts once read back."""

import dataclasses
import json
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.conformance import TARGET, params
from support.published import E, V, toy
from support.shapes import changed

import specjax
from specjax import cli
from specjax.draft import Eagle3, Medusa
from specjax.draft.eagle3.writing import FORMATS, write_head
from specjax.draft.heads.folder import load_head, read_head, save_head
from specjax.expand import Chain
from specjax.lm import Block
from specjax.models import ModelError
from specjax.models.llama import LlamaLM

sizes = operator.attrgetter("inner", "heads", "kv_heads", "head_dim")
IDS = "eagle_aux_hidden_state_layer_ids"
ONE = changed(TARGET.config, num_hidden_layers=1)
WINDOWED = changed(ONE, num_hidden_layers=2, sliding_window=3, sliding_layers=(False, True))
HEADS = {
    "plain": Eagle3(Chain(3), taps=(0, 1, 2), inner=40, heads=6, kv_heads=2, head_dim=12),
    "deep": Eagle3(taps=(1, 2), config=WINDOWED, norm_before_fc=True, norm_before_residual=True),
    "EAGLE-3.1": Eagle3(Chain(3), taps=(0, 1, 2), config=changed(ONE, qk_norm=True), fc_norm=True, norm_output=True),
    "narrow": Eagle3(taps=(0, 1, 2), config=changed(ONE, hidden_size=32, qkv_bias=True)),
}


def made(name, trim=False):
    """A head with random weights everywhere, as training leaves them."""
    drafter, target = HEADS[name].bind(TARGET), toy()
    own = drafter.head.init(jax.random.key(3))
    size = drafter.config.hidden_size
    own["head"] = {"kernel": jnp.zeros((size, V))}
    if size != E:
        own["embed"] = {"embedding": jnp.zeros((V, size))}
    leaves, tree = jax.tree.flatten(own)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    own = jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])
    return (drafter, own) if not trim else drafter.trimmed(own, target.params, np.arange(5, 85, 2))


def dists(drafter, own):
    """What the head says at five pairs, and at one more that feeds on its own output."""
    model, taps = {"target": toy().params, "draft": own}, len(drafter.taps)
    features = jax.random.normal(jax.random.key(6), (1, 5, taps * E))
    block = Block(jnp.asarray([[7, 1, 9, 3, 3]]), jnp.arange(5)[None], jnp.zeros((1,), jnp.int32))
    h, delta = drafter.read(model, features, block, None)
    last = Block(jnp.asarray([[4]]), jnp.full((1, 1), 5), jnp.zeros((1,), jnp.int32), jnp.ones((1, 1, 6), bool))
    more, _ = drafter.reread(model, h[:, -1:], last, None, delta)
    return np.asarray(drafter.logits(model, jnp.concatenate([h, more], axis=1)))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("layout", FORMATS)
def test_a_head_written_and_read_back_drafts_the_same(layout, name, tmp_path):
    drafter, own = made(name, trim=name != "deep")
    write_head(tmp_path, layout, drafter, own, toy())
    read, back = load_head(tmp_path, "eagle3", Eagle3, toy(), expander=drafter.expander)
    assert (read.taps, read.layers, sizes(read)) == (drafter.taps, drafter.layers, sizes(drafter))
    np.testing.assert_array_equal(dists(read, back), dists(drafter, own))
    assert ("ids" in own) == ("ids" in back) and ("embed" in own) == ("embed" in back)


def test_the_flat_file_is_what_vllm_and_sglang_look_for(tmp_path):
    drafter, own = made("narrow", trim=True)
    assert write_head(tmp_path, "eagle3", drafter, own, toy(), "bfloat16") == (
        "SGLang cannot be told to read the output of layer 0: it will read the layers after those meant",
    )
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["draft_vocab_size"], config["vocab_size"], config["torch_dtype"]) == (40, V, "bfloat16")
    assert config["attention_bias"] and not config["tie_word_embeddings"] and not config["norm_before_residual"]
    assert config[IDS] == config["eagle_config"][IDS] == [1, 2, 3] and config["target_hidden_size"] == E
    assert "norm_output" not in config  # a reader of old takes it for another thing
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 2 * 32)
    assert (
        tensors["midlayer.self_attn.o_proj.bias"].shape == (32,) and not tensors["midlayer.self_attn.o_proj.bias"].any()
    )
    assert tensors["fc.weight"].shape == (32, 3 * E) and tensors["lm_head.weight"].shape == (40, 32)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert tensors["embed_tokens.weight"].shape == (V, 32)
    np.testing.assert_array_equal(np.arange(40) + tensors["d2t"], np.flatnonzero(tensors["t2d"]))
    drafter, own = made("deep")
    notes = write_head(tmp_path / "more", "eagle3", drafter, own, toy())
    assert "it reads 2 of the target's layers" in notes[0] and "2 layers" in notes[1]
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"] and "target_hidden_size" not in config
    assert "embed_tokens.weight" not in load_file(tmp_path / "more" / "model.safetensors")
    assert config["eagle_config"][IDS] == [1, 2] and config[IDS] == [2, 3]  # outputs, since the first is 1; boundaries


def test_the_speculators_file_has_all_that_vllm_validates(tmp_path):
    drafter, own = made("EAGLE-3.1")
    assert "norms queries and keys" in write_head(tmp_path, "speculators", drafter, own, toy())[0]
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    greedy = config["speculators_config"]["proposal_methods"][0]
    assert greedy["proposal_type"] == "greedy" and greedy["speculative_tokens"] == drafter.depth == 3
    assert config["speculators_config"]["verifier"] == {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}
    assert config["transformer_layer_config"]["model_type"] == "qwen3" and config[IDS] == [1, 2, 3]
    assert [config[flag] for flag in ("fc_norm", "norm_before_fc", "norm_output")] == [True, False, True]
    assert config["norm_before_residual"] is False  # vLLM takes an absent one for true
    assert {"layers.0.hidden_norm.weight", "fc_norm.2.weight"} < set(tensors) and "d2t" not in tensors
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], toy().params["embed"]["embedding"])


@pytest.fixture
def target(tmp_path):
    specjax.models.save(tmp_path / "target", TARGET, params()["target"])
    return specjax.models.load(tmp_path / "target")


def test_the_command_writes_a_head_for_its_target(target, tmp_path, capsys):
    drafter, own = made("plain", trim=True)
    fields = {"taps": [0, 1, 2], "inner": 40, "heads": 6, "kv_heads": 2, "head_dim": 12}
    save_head(tmp_path / "head", "eagle3", fields, own, target)
    words = ["convert", str(tmp_path / "head"), str(tmp_path / "out"), "--format"]
    assert cli.main([*words, "speculators", "--target", str(tmp_path / "target")]) == 0
    head = read_head(tmp_path / "out", "eagle3", Eagle3, target)
    assert head.format == "speculators"
    np.testing.assert_array_equal(dists(head.drafter, head.params), dists(drafter, own))
    capsys.readouterr()
    for change, message in (
        (["eagle3", "--target", str(tmp_path / "target")], "exists and is not empty"),
        (["onnx"], "unknown format 'onnx' of a head; choose eagle3, speculators"),
    ):
        where = words if change[0] == "eagle3" else [*words[:2], str(tmp_path / "new"), "--format"]
        assert cli.main([*where, *change]) == 2
        assert message in capsys.readouterr().err


def test_what_cannot_be_written_is_said_before_anything_is_loaded(tmp_path, capsys):
    medusa = Medusa().bind(TARGET)
    own = medusa.init_params(jax.random.key(0), toy().params)
    save_head(tmp_path / "medusa", "medusa", {"heads": 3, "layers": 1}, own, toy())
    words = ["convert", str(tmp_path / "medusa"), str(tmp_path / "out")]
    assert cli.main([*words, "--format", "eagle3"]) == 2
    assert "a head for medusa cannot be written as eagle3" in capsys.readouterr().err
    assert cli.main([*words, "--target", "tiny"]) == 2
    assert "give --format too" in capsys.readouterr().err
    scaled = LlamaLM(changed(TARGET.config, logits_scaling=2.0))
    drafter, own = made("plain")
    with pytest.raises(ModelError, match="with layers of llama, mistral, qwen2, qwen3, and these are granite's"):
        wide = dataclasses.replace(drafter, config=changed(drafter.config, logits_scaling=2.0), target=scaled)
        write_head(tmp_path, "eagle3", wide, own, toy())
    assert not (tmp_path / "out").exists()
