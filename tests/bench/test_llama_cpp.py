"""llama.cpp as a peer: the file that it reads says what the folder says, and its texts are counted like ours."""

import json
import sys
import types

import jax
import numpy as np
import pytest
from support.shapes import small

from specjax import cli, models
from specjax.bench.peers.with_llama_cpp import LlamaCppPeer, interleaved, write_gguf
from specjax.bench.run import Theirs
from specjax.models import LlamaLM
from specjax.models.tensors import read_folder
from specjax.serve.request import Request

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
SHAPES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "tie_word_embeddings": True}}


def saved(folder, arch, seed=0):
    config = small(32, 16, 24, 2, 2, 1, 8, max_position_embeddings=64, **SHAPES[arch])
    lm = LlamaLM(config)
    models.save(folder, lm, jax.tree.map(lambda leaf: 4 * leaf, lm.init(jax.random.key(seed))), eos_ids=(3,))
    return folder


@pytest.mark.parametrize("arch", SHAPES)
def test_the_file_holds_the_folders_weights(tmp_path, arch):
    folder = saved(tmp_path / "model", arch)
    write_gguf(folder, tmp_path / "model.gguf")
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    said = lambda key: read.get_field(key).contents()
    assert said("general.architecture") == arch
    sizes = {
        "block_count": 2,
        "embedding_length": 16,
        "feed_forward_length": 24,
        "vocab_size": 32,
        "context_length": 64,
    }
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 8}
    assert {key: said(f"{arch}.{key}") for key in sizes} == sizes
    stored = {tensor.name: np.array(tensor.data) for tensor in read.tensors}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 2)
    wanted = {names.get_name(n, (".weight", ".bias")): t.array() for n, t in read_folder(folder).items()}
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = interleaved(tensor, 2 if "attn_q" in name else 1)
        np.testing.assert_array_equal(stored[name], tensor, err_msg=name)


def test_a_rope_of_neighbours_gives_the_same_scores():
    """Queries and keys of interleaved kernels turned by neighbours, against those turned by halves."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 8, 16))
    x, angles = rng.normal(size=(5, 16)), np.arange(5)[:, None] * 10000.0 ** (-np.arange(4) / 4)

    def turned(x, first, second):
        out = np.empty_like(x)
        out[:, first] = x[:, first] * np.cos(angles) - x[:, second] * np.sin(angles)
        out[:, second] = x[:, second] * np.cos(angles) + x[:, first] * np.sin(angles)
        return out

    halves = [turned(x @ kernel.T, slice(0, 4), slice(4, 8)) for kernel in (q, k)]
    pairs = [turned(x @ interleaved(kernel, 1).T, slice(0, 8, 2), slice(1, 8, 2)) for kernel in (q, k)]
    np.testing.assert_allclose(halves[0] @ halves[1].T, pairs[0] @ pairs[1].T)


def test_what_it_does_not_know_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    for change, said in (
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "takes models of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "without scaled ropes"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=said):
            write_gguf(folder, tmp_path / "model.gguf")


def test_a_text_ends_at_its_end_or_its_length():
    class Llama:
        def reset(self):
            self.fresh = True

        def generate(self, ids, **how):
            assert self.fresh and how == {"temp": 0.0}
            self.fresh = False
            yield from (ids[-1] + i for i in range(1, 100))

    requests = [Request("", (1, 2), max_new_tokens=3), Request("", (7,), max_new_tokens=9)]
    theirs = Theirs(LlamaCppPeer(Llama(), {"temp": 0.0}, eos=(10,)), requests, 1)
    theirs.warm()
    assert theirs.lap().tokens == [[3, 4, 5], [8, 9, 10]]


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    words = ["bench", "--model", saved(tmp_path / "model", "llama"), "--input", tmp_path / "in.jsonl"]
    assert cli.main([*map(str, words), "--drafter", "none", "--max-new-tokens", "8", "--peer", "llama.cpp"]) == 2
    assert "pip install 'specjax[peers]'" in capsys.readouterr().err


@pytest.mark.slow
def test_every_mode_is_asked(tmp_path, monkeypatch, capsys):
    """With a stand-in for the package: what it is loaded with, and what the rows are called."""
    loaded = []

    class Llama:
        def __init__(self, file, **how):
            assert gguf.GGUFReader(file).tensors and how["n_ctx"] >= 11 and how["use_mmap"] is False
            self.drafts, self.read = how["draft_model"], []
            loaded.append(self)

        def reset(self):
            self.read = []

        def generate(self, ids, temp, **how):
            assert not self.read
            self.read = ids
            if self.drafts is not None and not isinstance(self.drafts, Lookup):
                assert self.drafts(np.asarray(ids)).tolist() == [9, 9, 9, 9]
            while True:
                yield 9

    class Lookup:
        def __init__(self, num_pred_tokens):
            assert num_pred_tokens == 10

    package, inner = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    package.Llama, inner.LlamaDraftModel, inner.LlamaPromptLookupDecoding = Llama, object, Lookup
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", inner)
    folder = saved(tmp_path / "model", "qwen3")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    words = ["bench", "--model", folder, "--input", tmp_path / "in.jsonl", "--max-new-tokens", 8, "--json"]
    words += ["--drafter", f"none,draft:model={folder}", "--peer", "llama.cpp", "--repeats", 1]
    assert cli.main([*map(str, words)]) == 0
    peers = json.loads(capsys.readouterr().out)["peers"]
    assert [peer["mode"] for peer in peers] == ["greedy", "prompt_lookup", "draft (our wrapper)"]
    assert len(loaded) == 4 and all(peer["peer"] == "llama.cpp" and not peer["identical_text"] for peer in peers)


@pytest.mark.slow
def test_its_greedy_text_is_ours(capsys):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it builds from source for many minutes")
    words = ["bench", "--model", "tiny", "--drafter", "none,draft", "--peer", "llama.cpp", "--json", "--repeats", "1"]
    assert cli.main([*words, "--prompts", "4", "--max-new-tokens", "32", "--ignore-eos"]) == 0
    peers = json.loads(capsys.readouterr().out)["peers"]
    assert [peer["identical_text"] for peer in peers] == [True] * 3


def test_names_of_peers(capsys):
    assert cli.main(["bench", "--peer", "frob"]) == 2
    assert "unknown peer 'frob'; choose transformers, llama.cpp" in capsys.readouterr().err
