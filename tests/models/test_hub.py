"""`load` and `save`: formats, both config layouts, and one clear error for each bad folder."""

import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gguf_files, tiny_families
from support.conformance import but_slow
from support.passes import logits
from support.shapes import changed

from specjax import models
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft.heads.published import layouts, stems_of
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, ModelError, RopeScaling, hf_config, hub, llama_config, tensors

IDS = np.random.default_rng(0).integers(0, 128, (2, 12))
TINY = llama_config(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def edit(folder, changes=(), drop=(), name="config.json"):
    content = json.loads((folder / name).read_text()) | dict(changes)
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if key not in drop}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    lm = LlamaLM(TINY)
    models.save(folder, lm, lm.init(jax.random.key(0)), eos_ids=(3, 5))
    return folder


@pytest.fixture
def tiny(saved, tmp_path):
    """A folder that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "tiny")


def rewrite(folder, change):
    """Saves the weights again after `change(arrays)`."""
    import safetensors.numpy

    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize("name", but_slow(tiny_families.FAMILIES, *tiny_families.ALIKE))
def test_save_writes_what_transformers_reads(references, name, tmp_path):
    import torch
    import transformers

    reference = references(name)
    model = models.load(reference.folder, dtype="float32")
    models.save(tmp_path / "again", model.lm, model.params, eos_ids=(2, 7))
    how = {"dtype": "float32", "attn_implementation": reference.torch.config._attn_implementation}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", **how)
    assert type(theirs) is type(reference.torch)
    stored = {name for name in tensors.read_folder(reference.folder) if not name.endswith(tiny_families.COMPUTED)}
    assert set(tensors.read_folder(tmp_path / "again")) == stored
    assert theirs.generation_config.eos_token_id == [2, 7]
    with torch.no_grad():
        got, want = (each(torch.as_tensor(IDS)).logits.numpy() for each in (theirs, reference.torch))
    np.testing.assert_allclose(got, want, atol=1e-5)
    ours = models.load(tmp_path / "again", dtype="float32")
    assert ours.lm == model.lm and ours.eos_ids == (2, 7) and same(ours.params, model.params)


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama_biases", "mistral", "qwen2", "qwen3", "gemma2"])
def test_both_rope_layouts(references, name):
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling` with `type` or `rope_type`."""
    reference = references(name)
    config = json.loads((reference.folder / "config.json").read_text())
    want = models.load(reference.folder).lm.config
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    for key in ("type", "rope_type"):
        scaling = None if kind == "default" else {key: kind, **rope}
        assert hf_config.from_hf({**config, "rope_theta": theta, "rope_scaling": scaling}) == want
    assert hf_config.from_hf(hf_config.to_hf(want)) == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_shards(references, tmp_path, dtype):
    import torch

    reference = references("qwen2")
    kind = getattr(torch, dtype)
    half = type(reference.torch)(reference.torch.config).to(kind)
    half.load_state_dict({name: tensor.to(kind) for name, tensor in reference.torch.state_dict().items()})
    half.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    model = models.load(tmp_path, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {dtype} == {model.dtype.name}
    rounded = models.load(reference.folder, dtype=dtype)
    assert same(model.params, rounded.params)
    wide = models.load(tmp_path, dtype="float32")
    theirs = type(half).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.as_tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(logits(wide.lm, wide.params, IDS), want, atol=2e-4)


def test_dtypes(saved):
    backend = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    assert models.load(saved).dtype == jnp.dtype(backend)
    assert models.load(saved, dtype=jnp.bfloat16).params["norm"]["scale"].dtype == jnp.bfloat16
    for bad in ("float31", "int8", 7):
        with pytest.raises(ModelError, match="unknown dtype .*choose float32, bfloat16, float16"):
            models.load(saved, dtype=bad)


def test_model_facts(saved):
    model = models.load(str(saved), dtype="float32")
    assert (model.name, model.path, model.tokenizer) == ("tiny", saved, None)
    assert model.eos_ids == (3, 5) and model.lm.config == TINY


def test_eos_ids_are_ids(tiny):
    edit(tiny, {"eos_token_id": "</s>"})
    assert models.load(tiny).eos_ids == (3, 5)  # of generation_config.json
    edit(tiny, {"eos_token_id": None}, name="generation_config.json")
    with pytest.raises(ModelError, match="eos_token_id must be token ids"):
        models.load(tiny)


def test_tokenizer_round_trip(tiny, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model = models.load(tiny)
    models.save(tmp_path / "with", model.lm, model.params, tokenizer=wrapped)
    again = models.load(tmp_path / "with")
    assert again.tokenizer("b a c")["input_ids"] == [1, 0, 2] and again.eos_ids == ()
    (tmp_path / "with" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer files cannot be read"):
        models.load(tmp_path / "with")


def test_save_replaces_and_leaves_nothing_behind(tiny):
    model = models.load(tiny)
    doubled = jax.tree.map(lambda x: 2 * x, model.params)
    models.save(tiny, model.lm, doubled, dtype="bfloat16")
    assert [file.name for file in tiny.parent.iterdir()] == ["tiny"]
    again = models.load(tiny, dtype="bfloat16")
    assert same(again.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), doubled))
    with pytest.raises(ModelError, match="is a file"):
        models.save(tiny / "config.json", model.lm, model.params)
    with pytest.raises(ModelError, match="cannot be written as int8"):
        models.save(tiny, model.lm, jax.tree.map(lambda x: x.astype(jnp.int8), model.params))
    assert [file.name for file in tiny.parent.iterdir()] == ["tiny"]


def test_shipped_models_are_found_by_name(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_PRETRAINED", saved.parent)
    monkeypatch.chdir(tmp_path)
    assert models.shipped() == {"tiny": saved} and models.load("tiny").name == "tiny"
    with pytest.raises(
        ModelError, match=r"unknown model 'tinny'.*a name \(tiny, smollm2, gemma3-270m\).*is tiny meant\?"
    ):
        models.load("tinny")


def test_hub_ids(saved, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(saved))
    assert models.load("someone/tiny").name == "someone/tiny" and {*asked} == {"someone/tiny"}

    def fail(name, **_):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"unknown model 'someone/other'.*hub did not give it \(no route\)"):
        models.load("someone/other")


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A repository of a hub, whose files are fetched as the client's own patterns say; what was, and at which revisions."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    there, here, fetched = tmp_path / "there", tmp_path / "here", []
    there.mkdir()

    def snapshot_download(name, revision=None, **patterns):
        assert name == "owner/tiny"
        files = [str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()]
        for file in filter_repo_objects(files, **patterns):
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(there / file, here / file)
            fetched.append((file, revision))
        return str(here)

    def list_repo_files(name, revision=None):
        assert name == "owner/tiny"
        return [str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_repo_files)
    return there, fetched


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A GGUF file, and the folder that it was made of."""
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    home = tmp_path_factory.mktemp("packed")
    gguf_files.build("qwen3", home / "plain")
    gguf_files.write("qwen3", home / "plain", home / "tiny.gguf")
    return home / "tiny.gguf", home / "plain"


def test_a_hub_id_may_bring_one_gguf_file(packed, remote, monkeypatch):
    import huggingface_hub

    file, plain = packed
    there, fetched = remote
    (there / "README.md").write_text("")
    shutil.copy(file, there / "tiny.gguf")
    (there / "mmproj-tiny.gguf").write_bytes(b"reads images")
    model = models.load("owner/tiny@v1.0")
    assert model.name == "owner/tiny@v1.0" and model.path.name == "tiny.gguf"
    assert same(model.params, models.load(plain).params)
    assert fetched == [("tiny.gguf", "v1.0")]

    def fail(name, **_):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)  # without a network, from what was fetched
    assert models.load("owner/tiny").path.name == "tiny.gguf"


def test_of_several_gguf_files_of_a_hub_id_one_is_named(packed, remote):
    file, _ = packed
    there, fetched = remote
    shards = [f"Q8/tiny-Q8-0000{i}-of-00002.gguf" for i in (1, 2)]
    for name in ("tiny-Q4.gguf", *shards):
        (there / name).parent.mkdir(exist_ok=True)
        shutil.copy(file, there / name)
    several = f"owner/tiny@v1 holds 2 models, {shards[0]}, tiny-Q4.gguf: give one of them, as owner/tiny/{shards[0]}@v1"
    with pytest.raises(ModelError, match=re.escape(several) + "$"):
        models.load("owner/tiny@v1")
    assert fetched == []
    model = models.load("owner/tiny/tiny-Q4.gguf@v1")
    assert model.name == "owner/tiny/tiny-Q4.gguf@v1" and fetched == [("tiny-Q4.gguf", "v1")]
    assert models.load("owner/tiny/tiny-Q4.gguf", revision="v2").lm == model.lm
    assert fetched[-1] == ("tiny-Q4.gguf", "v2")
    fetched.clear()
    assert models.load(f"owner/tiny/{shards[0]}").path.name == "tiny-Q8-00001-of-00002.gguf"
    assert {name for name, _ in fetched} == {*shards}
    with pytest.raises(
        ModelError, match=r"owner/tiny has no such file; it has Q8/tiny-Q8-00001-of-00002.gguf, tiny-Q4.gguf"
    ):
        models.load("owner/tiny/Q2.gguf")


@pytest.mark.parametrize("sharded", [True, False])
def test_a_hub_id_brings_what_is_needed_and_nothing_twice(sharded, saved, remote):
    """As gpt-oss and Mistral publish theirs: the same weights again in a subfolder and in the maker's own format."""
    there, fetched = remote
    shutil.copy(saved / "config.json", there)
    weights = ["model-00001-of-00001.safetensors"] if sharded else ["model.safetensors"]
    again = [
        "original/model.safetensors",
        "consolidated.safetensors",
        "model-00002-of-00002.safetensors",
        "metal/model.bin",
    ]
    for name in (*weights, *again):
        (there / name).parent.mkdir(exist_ok=True)
        shutil.copy(saved / "model.safetensors", there / name)
    (there / "original" / "config.json").write_text("{}")
    index = {"weight_map": dict.fromkeys(tensors.read_folder(saved), weights[0])}
    if sharded:
        (there / "model.safetensors.index.json").write_text(json.dumps(index))
    model = models.load("owner/tiny@v1.0")
    assert model.name == "owner/tiny@v1.0" and same(model.params, models.load(saved).params)
    small = {"config.json"} | ({"model.safetensors.index.json"} if sharded else set())
    assert {*fetched} == {(name, "v1.0") for name in small | {*weights}}
    fetched.clear()
    models.load("owner/tiny")
    assert {revision for _, revision in fetched} == {None}


def test_heads_and_adapters_have_revisions_too(remote):
    there, fetched = remote
    for name in ("config.json", "medusa_lm_head.safetensors", "adapter_model.safetensors", "model.safetensors"):
        (there / name).write_text("{}")
    every = stems_of(*layouts().values())
    for stems, wanted in ((every, 3), (("adapter_model",), 1), (("model",), 1)):
        fetched.clear()
        name, folder = hub.find("owner/tiny@refs/pr/2", {}, "head", stems)
        assert name == "owner/tiny@refs/pr/2" and folder.is_dir()
        assert len({file for file, _ in fetched}) == wanted + 1 and {at for _, at in fetched} == {"refs/pr/2"}
    stored = parse("drafter", DRAFTERS, "medusa:model=owner/tiny@refs/pr/2")
    assert stored.asked == "owner/tiny@refs/pr/2"


def test_a_folder_in_another_format_is_told_what_to_do(tiny):
    (tiny / "tekken.json").write_text("{}")
    with pytest.raises(
        ModelError, match="tekken.json cannot be read .it lacks 'config'.; fetch it again, or remove it"
    ):
        models.load(tiny)
    (tiny / "tekken.json").unlink()
    (tiny / "model.safetensors").rename(tiny / "consolidated.safetensors")
    with pytest.raises(
        ModelError, match="nor model.safetensors.index.json; it holds consolidated.safetensors, a format that"
    ):
        models.load(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(ModelError, match="has no config.json; .*; it holds consolidated.safetensors, a format that is"):
        models.load(tiny)
    (tiny / "consolidated.safetensors").rename(tiny / "tiny-Q4.gguf")
    with pytest.raises(ModelError, match="tiny-Q4.gguf is not a GGUF file: it does not begin with the letters GGUF"):
        models.load(tiny)


def test_scales_of_a_quantised_cache_are_not_used(tiny, saved, caplog):
    at = "model.layers.0.self_attn"
    names = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale", "attn.k_scale", "k_proj.k_scale")
    scales = {f"{at}.{name}": np.ones(1, np.float32) for name in (*names, "v_proj.output_scale", "v_zero_point")}
    rewrite(tiny, lambda arrays: arrays.update(scales))
    assert same(models.load(tiny).params, models.load(saved).params)
    (line,) = [record.getMessage() for record in caplog.records if "scales" in record.getMessage()]
    assert "tiny: 9 scales of a quantised cache" in line
    rewrite(tiny, lambda arrays: arrays.update({f"{at}.k_proj.frob_scale": np.ones(1, np.float32)}))
    with pytest.raises(ModelError, match="unused model.layers.0.self_attn.k_proj.frob_scale"):
        models.load(tiny)


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "/no/such/folder"])
def test_unknown_models(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"unknown model '{name}'"):
        models.load(name)
    with pytest.raises(ModelError, match=r"has no config.json"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "drop", "message"),
    [
        (
            {"architectures": ["DeepseekV32ForCausalLM"]},
            (),
            r"architecture: DeepseekV32ForCausalLM \(sparse attention .*\); supported are LlamaFor",
        ),
        ({"model_type": "rwkv"}, ("architectures",), "unsupported architecture: rwkv"),
        ({}, ("architectures", "model_type"), "unsupported architecture: none named"),
        ({"hidden_act": "gelu"}, (), "hidden_act 'gelu'"),
        ({"vocab_size": "many"}, ("hidden_size",), "positive integers for: vocab_size, hidden_size"),
        ({"head_dim": "wide"}, (), "positive integers for: head_dim"),
        ({"num_key_value_heads": 3}, (), "2 attention heads do not split over 3"),
        ({"hidden_size": 9}, ("head_dim",), "hidden_size 9 is not a multiple of 2 heads"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            (),
            "rope type 'longrope'; supported are default, linear",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            (),
            "'llama3' needs a positive number for low_freq_factor, high",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, (), "per layer type"),
        ({"partial_rotary_factor": 0.5}, (), "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, (), "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, (), "sliding_window must be a positive"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"]},
            (),
            "layer_types has unknown kinds: chunked_attention",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 2}, (), "names 2 of 1 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"]}, (), "sliding window is off"),
    ],
)
def test_bad_configs(tiny, changes, drop, message):
    edit(tiny, changes, drop)
    with pytest.raises(ModelError, match=message):
        models.load(tiny)


def test_config_that_is_not_json(tiny):
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
        models.load(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        models.load(tiny)


def test_defaults_of_each_family():
    sizes = {
        "vocab_size": 8,
        "hidden_size": 512,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    import transformers

    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        theirs = getattr(transformers, f"{name}Config")(**sizes)
        ours = hf_config.from_hf({"architectures": [f"{name}ForCausalLM"], **sizes})
        assert ours.near.num_key_value_heads == theirs.num_key_value_heads, name
        assert ours.near.window == getattr(theirs, "sliding_window", None), name
        assert ours.max_position_embeddings == theirs.max_position_embeddings, name
        assert ours.norm.eps == theirs.rms_norm_eps, name
        assert ours.near.head_dim == (getattr(theirs, "head_dim", None) or 16)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.head.tied == theirs.tie_word_embeddings
    assert hf_config.from_hf({"model_type": "mistral", "sliding_window": None, **sizes}).near.window is None


def test_config_without_an_architecture_cannot_be_saved():
    for odd in (
        {"mlp_bias": True, "qk_norm": True},
        {"o_bias": True, "qk_norm": True},
        {"sliding_window": 4, "qkv_bias": True, "mlp_bias": True},
    ):
        with pytest.raises(ModelError, match="no supported architecture has"):
            hf_config.to_hf(changed(TINY, **odd))
    scaled = changed(TINY, rope_scaling=RopeScaling("linear", 2.0))
    assert hf_config.from_hf(hf_config.to_hf(scaled)) == scaled


def test_every_wrong_tensor_is_named_at_once(tiny):
    def spoil(arrays):
        del arrays["model.norm.weight"]
        arrays["lm_head.weight"] = arrays["lm_head.weight"][:5]
        arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    rewrite(tiny, spoil)
    with pytest.raises(ModelError) as error:
        models.load(tiny)
    text = str(error.value)
    assert "missing model.norm.weight [8]" in text
    assert "lm_head.weight has shape [5, 8], config.json says [16, 8]" in text
    assert "unused model.layers.0.self_attn.q_proj.bias [8]" in text and "inv_freq" not in text


def test_a_tied_model_with_another_head_uses_that(tiny, caplog):
    """As transformers does, which finds both in the file."""
    import torch
    import transformers

    edit(tiny, {"tie_word_embeddings": True})
    model = models.load(tiny, dtype="float32")
    assert not model.lm.config.head.tied and "head" in model.params
    assert [r for r in caplog.records if "a head that differs from its table" in r.getMessage()]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    ids = IDS % TINY.vocab_size
    block = Block(
        jnp.asarray(ids, jnp.int32), jnp.broadcast_to(jnp.arange(12)[None], ids.shape), jnp.zeros(2, jnp.int32)
    )
    with torch.no_grad():
        wanted = theirs(torch.as_tensor(ids)).logits.numpy()
    np.testing.assert_allclose(model.lm(model.params, block, None, wants=Wants(logits=True)).logits, wanted, atol=1e-5)


def test_tied_models_may_store_an_equal_head(tiny):
    edit(tiny, {"tie_word_embeddings": True})
    rewrite(tiny, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"]}))
    assert "head" not in models.load(tiny).params


def test_other_tensor_types(tiny):
    rewrite(tiny, lambda arrays: arrays.update({"model.norm.weight": np.ones(8, np.float64)}))
    with pytest.raises(ModelError, match=r"model.norm.weight has type F64; supported are F32, F16, BF16"):
        models.load(tiny)


def test_broken_files(tiny):
    file = tiny / "model.safetensors"
    whole = file.read_bytes()
    for content, message in [
        (whole[:-4], "is truncated: .* lies outside it"),
        (whole[:20], "is truncated or is not a safetensors file"),
        (b"abc", "is truncated or is not a safetensors file"),
        ((4).to_bytes(8, "little") + b"abcd", "malformed safetensors header"),
        ((2).to_bytes(8, "little") + b"[]", "malformed safetensors header"),
        (whole.replace(b'"shape":[8]', b'"shape":[7]'), "does not fill its"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            models.load(tiny)
    file.rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model.safetensors nor .*; convert its .bin weights"):
        models.load(tiny)


def test_broken_index(tiny):
    names = list(tensors.read_header(tiny / "model.safetensors"))
    (tiny / "model.safetensors").rename(tiny / "model-1.safetensors")
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    assert models.load(tiny).lm.config == TINY
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors") | {"x": "model-2.safetensors"}})
    )
    with pytest.raises(ModelError, match=r"names files that are not in the folder: model-2.safetensors"):
        models.load(tiny)
    index.write_text("{}")
    with pytest.raises(ModelError, match="needs a weight_map"):
        models.load(tiny)


@pytest.mark.slow
def test_importing_the_package_is_light():
    code = "import sys, specjax.models; print([m for m in ('flax', 'transformers', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = models.nothing
