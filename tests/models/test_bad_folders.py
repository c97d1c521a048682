"""Folders from strangers: their code is never run, and whatever is wrong with their files is one line that names it."""

import json
import shutil

import jax
import pytest

from specjax import models
from specjax.models import LlamaConfig, LlamaLM, ModelError

TINY = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    folder, lm = tmp_path_factory.mktemp("tiny") / "tiny", LlamaLM(TINY)
    params = jax.tree.map(lambda x: jax.numpy.zeros(x.shape), lm.abstract())
    models.save(folder, lm, params, tokenizer=wrapped)
    return folder


@pytest.fixture
def tiny(saved, tmp_path):
    """A folder that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "tiny")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder, load=models.load):
    """The one line of the error."""
    with pytest.raises(ModelError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


LLADA = {
    "model_type": "llada", "d_model": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "mlp_hidden_size": 12,
    "max_sequence_length": 64, "mask_token_id": 3,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "llada"])
def test_code_of_a_folder_is_never_run_and_nobody_is_asked(tiny, monkeypatch, kind):
    ran = tiny / "ran"
    (tiny / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    edit(
        tiny / "config.json", auto_map=own, **({"architectures": ["LLaDAModelLM"], **LLADA} if kind == "llada" else {})
    )
    # the tokenizer's class is one that transformers has, so a config with code of its own hinders nothing
    assert models.tokenizer.load(tiny)("b a c")["input_ids"] == [1, 0, 2]
    for asked in ({"AutoTokenizer": ["own.Own", None]}, ["own.Own", None]):
        edit(tiny / "tokenizer_config.json", auto_map=asked)
        assert models.tokenizer.load(tiny)("b a c")["input_ids"] == [1, 0, 2]
        edit(tiny / "tokenizer_config.json", tokenizer_class="Own")
        said = refused(tiny)
        assert "tokenizer_config.json asks for code of the folder's own (auto_map), and specjax never runs" in said
        edit(tiny / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert not ran.exists()
