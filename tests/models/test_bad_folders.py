"""Folders from strangers: their code is never run, and whatever is wrong with their files is one line that names it."""

import json
import shutil

import jax
import pytest

from specjax import models
from specjax.models import LlamaLM, ModelError, gemma_config, llama_config
from specjax.models.tensors import read_header

TINY = llama_config(
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


HUGE = 10**30
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.5, "high_freq_factor": 4.0}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; models of up to 1000 layers are read"),
        ({"architectures": ["LLaDAModelLM"], **LLADA, "n_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"num_hidden_layers": True, "vocab_size": HUGE}, "positive integers for: vocab_size, num_hidden_layers"),
        *(({"rope_theta": x}, "rope_theta must be a positive number") for x in (0, -1, True, "x", [], 1e39, float("nan"))),
        *(({"rms_norm_eps": x}, "rms_norm_eps must be a positive number") for x in (-1, None, float("inf"))),
        *(({**MISTRAL, "sliding_window": x}, "sliding_window must be a positive integer") for x in ("x", True, HUGE, -4)),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": "x"}, "max_window_layers must be a number"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object, not 'x'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'linear' needs a positive number for factor"),
        ({"rope_scaling": LLAMA3}, "needs a low_freq_factor of at most its high_freq_factor"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({**SDAR, "mask_token_id": True}, "needs a mask_token_id, got True"),
        ({**SDAR, "block_size": HUGE}, "needs a block_size of at least 1"),
        *(({"eos_token_id": x}, "eos_token_id must be token ids") for x in (HUGE, True, -1, [1, "x"], 1.0)),
        ({"text_config": "x"}, "text_config must be an object"),
        ({"architectures": 5}, "config.json has a field of the wrong kind"),
        ({"initializer_range": "x"}, "config.json has a field that transformers does not accept"),
    ],
)  # fmt: skip
def test_fields_that_are_not_what_they_should_be(tiny, changes, message):
    edit(tiny / "config.json", **changes)
    assert message in refused(tiny)


def test_fields_of_diffusion_gemma():
    sizes = {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 4}
    read = lambda text={}, generation={}: gemma_config.from_hf({"text_config": sizes | text}, generation)
    assert read()[0].num_experts == 2
    rope = lambda **more: {
        "rope_parameters": {"sliding_attention": {"rope_type": "proportional", "rope_theta": 1e4} | more}
    }
    for text, message in (
        ({"num_hidden_layers": 10**6}, "models of up to 1000 layers are read"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number"),
        ({"head_dim": True}, "positive integers for: head_dim"),
        (rope(rope_theta=0), "rope_theta must be a positive number"),
        (rope(factor=-1), "rope factor must be a positive number"),
        (rope(partial_rotary_factor=float("nan")), "partial_rotary_factor nan"),
    ):
        with pytest.raises(ModelError, match=message):
            read(text)
    for generation, message in (
        ({"sampler_config": "x"}, "sampler_config must be an object"),
        ({"t_min": "x"}, "the sampler's t_min must be a positive number"),
    ):
        with pytest.raises(ModelError, match=message):
            read(generation=generation)


DEEP = b"[" * 100_000


def test_json_that_is_nested_too_deeply(tiny):
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        whole = (tiny / name).read_bytes()
        (tiny / name).write_bytes(b'{"a":' + DEEP)
        assert f"{name} is not valid JSON: it is nested too deeply" in refused(tiny)
        (tiny / name).write_bytes(whole)
    weights = tiny / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    assert "has a malformed safetensors header" in refused(tiny)
    weights.rename(tiny / "model-1.safetensors").write_bytes(whole)
    (tiny / "model.safetensors.index.json").write_bytes(DEEP)
    assert "index.json is malformed: it needs a weight_map" in refused(tiny)


def header(**tensors):
    text = json.dumps({n: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for n, (a, b) in tensors.items()})
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ("tensors", "data", "message"),
    [
        ({"one": (0, 4), "two": (2, 6)}, 6, "two overlaps one"),
        ({"one": (0, 4), "two": (6, 8)}, 8, "two leaves a gap after one"),
        ({"one": (1, 4)}, 4, "one leaves a gap after the header"),
        ({"one": (0, 4)}, 9, "has 5 bytes after its last tensor"),
        ({"one": (0, 4), "same": (0, 4)}, 4, "same overlaps one"),
    ],
)
def test_safetensors_whose_parts_do_not_follow_each_other(tmp_path, tensors, data, message):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = tmp_path / "it.safetensors"
    file.write_bytes(header(**tensors) + bytes(data))
    with pytest.raises(SafetensorError):  # the format's own library does not read it either
        load_file(file)
    assert message in refused(file, read_header)
    file.write_bytes(header(one=(0, 4), none=(4, 4), two=(4, 9)) + bytes(9))
    assert set(read_header(file)) == {"one", "none", "two"} == set(load_file(file))
