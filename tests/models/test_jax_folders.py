"""Checkpoints of MaxText and of the library gemma: the numbers and logits of the Hugging Face model that they hold."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import jax_libraries
from support.passes import logits
from support.tiny_sizes import FULL, SLIDING

from specjax import cli, models
from specjax.jobs.manifest import fingerprint
from specjax.models import ModelError
from specjax.models.jax_folders import folder as jax_folders
from specjax.sharding import make_mesh

IDS = np.random.default_rng(0).integers(0, 128, (2, 24))
DRAWN = {
    "gemma": {"attention_bias": False},
    "gemma2": {"num_hidden_layers": 4},
    "gemma3": {"num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING]},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"attention_bias": False},
}


def check(reference, folder):
    """The parameters are those of the Hugging Face folder, up to the rounding of factors."""
    model, plain = models.load(folder, config=reference.folder), models.load(reference.folder)
    assert (model.lm, model.eos_ids, model.generation) == (plain.lm, plain.eos_ids, plain.generation)
    chex.assert_trees_all_close(model.params, plain.params, rtol=1e-5, atol=1e-6)
    return model


@pytest.fixture(scope="module")
def llama(references, tmp_path_factory):
    """Of Llama 3.1: the Hugging Face folder, and a step that MaxText wrote."""
    folder = tmp_path_factory.mktemp("maxtext") / "7"
    jax_libraries.write(folder / "items", jax_libraries.maxtext(references("llama3").folder, "scanned"))
    return references("llama3"), folder


def test_llama_3_of_maxtext(llama):
    reference, folder = llama
    assert check(reference, folder / "items").path == folder / "items"
    mesh = make_mesh("model=8")  # wider than there are kv-heads
    model, plain = models.load(folder, mesh=mesh, config=reference.folder), models.load(reference.folder, mesh=mesh)
    chex.assert_trees_all_close(model.params, plain.params, rtol=1e-5, atol=1e-6)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, model.params, plain.params))


def test_a_config_beside_the_checkpoint(llama, tmp_path):
    """Also a type of 16 bits, which rounds once."""
    reference, folder = llama
    copy = shutil.copytree(folder, tmp_path / "7")
    shutil.copy(reference.folder / "config.json", copy)
    model, plain = (models.load(one, dtype="bfloat16") for one in (copy, reference.folder))
    chex.assert_trees_all_equal(model.params["embed"], plain.params["embed"])
    chex.assert_trees_all_close(model.params, plain.params, rtol=1e-2)
    assert model.params["norm"]["scale"].dtype == jnp.bfloat16
    before = fingerprint(copy)
    (copy / "items" / "d" / "another").write_bytes(b"of another training")
    assert fingerprint(copy) != before


def test_gemma_2_of_its_library(references, tmp_path):
    reference = references("gemma2", **DRAWN["gemma2"])
    jax_libraries.write(tmp_path / "flat", jax_libraries.gemma(reference.folder, "flat", transposed=False))
    check(reference, tmp_path / "flat")


def test_fewer_rows_than_the_config_says_are_all_tokens(references, llama, tmp_path):
    """As of Gemma 3, whose Hugging Face folders have more."""
    reference, folder = llama
    config = json.loads((reference.folder / "config.json").read_text()) | {"vocab_size": 150}
    (tmp_path / "other.json").write_text(json.dumps(config))
    model = models.load(folder, config=tmp_path / "other.json")
    assert model.lm.vocab_size == 128 + jax_libraries.PADDING == model.params["embed"]["embedding"].shape[0]


def test_bad_folders(llama, tmp_path):
    reference, folder = llama
    say = lambda match: pytest.raises(ModelError, match=match)

    def config(**fields):
        file = tmp_path / "other.json"
        file.write_text(json.dumps(json.loads((reference.folder / "config.json").read_text()) | fields))
        return file

    with say("7 has an Orbax checkpoint and no config.json: give config="):
        models.load(folder)
    with say("unknown configuration 'nowhere': no such folder"):
        models.load(folder, config="nowhere")
    with say("adapter, longest, revision and config have no effect on a loaded model"):
        models.load((None, {}), config=reference.folder)
    bias = r"missing decoder/layers/self_attention/key/bias \[2, 16\]"
    with say(rf"does not fit config.json: missing decoder/logits_dense/kernel \[64, 128\]; {bias}"):
        qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
        models.load(folder, config=config(**qwen, layer_types=None))
    with say("MaxText's checkpoints of 'olmo2' are not read; those of llama, mistral"):
        models.load(folder, config=config(architectures=["Olmo2ForCausalLM"], model_type="olmo2"))
    with say(r"decoder/layers/mlp/wi_0/kernel has shape \[64, 2, 96\], config.json says \[64, 2, 90\]"):
        models.load(folder, config=config(intermediate_size=90))
    with say("the checkpoint has 2 layers, and config.json says 3"):
        models.load(folder, config=config(num_hidden_layers=3, layer_types=None))
    with say("the checkpoint has 2 layers, and config.json says 1"):
        models.load(folder, config=config(num_hidden_layers=1, layer_types=None))
    jax_libraries.write(tmp_path / "else", {"net": {"w": np.ones(3, np.float32)}})
    with say(r"names of no library of MaxText, Tunix, the library gemma \(net/w\)"):
        models.load(tmp_path / "else", config=reference.folder)
    torn = shutil.copytree(folder / "items", tmp_path / "torn")
    for file in torn.rglob("d/*"):
        file.write_bytes(b"")
    with say("is not a whole Orbax checkpoint .* fetch it again"):
        models.load(torn, config=reference.folder)


@pytest.mark.slow
@pytest.mark.covers("models", "maxtext", "convert")
@pytest.mark.parametrize(
    "name, form",
    (
        ("llama2", "scanned"), ("llama3", "apart"), ("llama3", "scanned"), ("mistral", "apart"), ("mixtral", "scanned"),
        ("mixtral", "apart"), ("qwen2", "scanned"), ("qwen3", "apart"), ("gemma", "scanned"), ("gemma2", "scanned"),
        ("gemma2", "apart"), ("gemma3", "scanned"), ("gemma3", "apart"), ("gemma3", "blocks 2"),
    ),
)  # fmt: skip
def test_logits_of_maxtext(references, tmp_path, name, form):
    reference = references(name, **DRAWN.get(name, {}))
    jax_libraries.write(tmp_path / "items", jax_libraries.maxtext(reference.folder, form))
    model = check(reference, tmp_path)
    found = logits(model.lm, model.params, IDS)
    np.testing.assert_allclose(found, reference.logits(IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.covers("models", "gemma", "gemma2", "gemma3")
@pytest.mark.parametrize(
    "name, form, transposed, drawn",
    (
        ("gemma", "flat", False, {}), ("gemma", "nested", False, {"num_key_value_heads": 4}), ("gemma2", "flat", True, {}),
        ("gemma2", "stacked 2", False, {}), ("gemma3", "nested", True, {}),
        ("gemma3", "stacked 3", True, {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2}),
    ),
)  # fmt: skip
def test_logits_of_the_library_gemma(references, tmp_path, name, form, transposed, drawn):
    reference = references(name, **DRAWN[name] | drawn)
    jax_libraries.write(tmp_path / "gemma", jax_libraries.gemma(reference.folder, form, transposed))
    model = check(reference, tmp_path / "gemma")
    found = logits(model.lm, model.params, IDS)
    np.testing.assert_allclose(found, reference.logits(IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.covers("models", "maxtext")
def test_stacked_layers_of_gemma_are_counted(references, tmp_path):
    reference = references("gemma2", **DRAWN["gemma2"])
    jax_libraries.write(tmp_path / "gemma", jax_libraries.gemma(reference.folder, "stacked 2", False))
    said = json.loads((reference.folder / "config.json").read_text())
    for count in (2, 6):
        (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": count, "layer_types": None}))
        with pytest.raises(ModelError, match=f"the checkpoint has 4 layers, and config.json says {count}"):
            models.load(tmp_path / "gemma", config=tmp_path / "config.json")


@pytest.mark.slow
@pytest.mark.covers("models", "maxtext")
def test_an_nnx_module_of_maxtext(references, tmp_path, monkeypatch):
    """Its numbers are in boxes; and arrays that are read one at a time."""
    reference = references("qwen3", **DRAWN["qwen3"])
    tree = jax_libraries.maxtext(reference.folder, "scanned")["params"]["params"]
    jax_libraries.write(tmp_path / "items", jax.tree.map(lambda x: {"value": x}, tree))
    monkeypatch.setattr(jax_folders, "_TOGETHER", 0)
    check(reference, tmp_path)


@pytest.mark.slow
@pytest.mark.covers("models", "convert")
def test_convert_with_a_config(llama, tmp_path):
    reference, folder = llama
    words = [
        "convert",
        str(folder),
        str(tmp_path / "out"),
        "--layout",
        "safetensors",
        "--config",
        str(reference.folder),
    ]
    assert cli.main(words) == 0
    model, plain = models.load(tmp_path / "out"), models.load(reference.folder)
    chex.assert_trees_all_close(model.params, plain.params, rtol=1e-5, atol=1e-6)
