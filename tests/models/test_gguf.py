"""Models in GGUF files that llama.cpp's own package wrote: every architecture, type, part of a tensor and split."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import gguf_files

from specjax import models
from specjax.jobs import datastore
from specjax.jobs.manifest import fingerprint
from specjax.lm import Block, Wants
from specjax.models import ModelError, byte_ranges, generation
from specjax.models.gguf import model as gguf_model
from specjax.models.gguf import tensors as gguf_tensors
from specjax.models.packed import base
from specjax.sharding import make_mesh

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
pytest.importorskip("torch", reason="torch is not installed: pip install torch")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(name)`: transformers' model of that case, its folder and its file."""
    kept = {}

    def get(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            model = gguf_files.build(name, folder / "plain")
            gguf_files.write(name, folder / "plain", folder / f"{name}.gguf")
            kept[name] = model, folder / "plain", folder / f"{name}.gguf"
        return kept[name]

    return get


def close(ours, theirs):
    """Whether two configs say the same, up to float32."""
    ours, theirs = (dataclasses.asdict(config) for config in (ours, theirs))
    return jax.tree.all(jax.tree.map(lambda a, b: a == b or np.isclose(a, b, rtol=1e-6), ours, theirs))


@pytest.mark.parametrize("name", gguf_files.CASES)
def test_a_file_is_the_folder_that_it_was_made_of(made, name):
    _, folder, file = made(name)
    wanted, found = models.load(folder), models.load(file)
    assert close(found.lm.config, wanted.lm.config)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found.params), jax.tree.leaves(wanted.params), strict=True
    ):
        exact = not (name.startswith("gemma") and "norm" in str(path))  # which are stored with 1 added
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0 if exact else 1e-6, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.covers("models", "gguf", "hub")
@pytest.mark.parametrize("name", gguf_files.CASES)
def test_logits_are_those_of_transformers(made, name):
    import torch

    reference, _, file = made(name)
    model = models.load(file)
    ids = np.random.default_rng(0).integers(0, 128, (2, 24))
    with torch.no_grad():
        wanted = reference(torch.as_tensor(ids)).logits.float().numpy()
    block = Block(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(24), (2, 24)), jnp.zeros(2, jnp.int32))
    found = jax.jit(lambda params, block: model.lm(params, block, None, wants=Wants(logits=True)).logits)
    assert wanted.std() > 0.3
    np.testing.assert_allclose(found(model.params, block), wanted, atol=1e-4)


PARTS = {"llama": "Q4_0", "mixtral": "Q8_0", "gpt-oss": "Q5_1", "gemma3": "F16", "glm4moe": "BF16"}


def stored(made, name, folder):
    """A file whose matrices are stored in the type of that case."""
    gguf_files.write(name, made(name)[1], folder / "it.gguf", PARTS[name])
    return folder / "it.gguf"


@pytest.mark.parametrize("name", PARTS)
def test_any_part_of_a_tensor_is_read_alone(made, name, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "PIECE", 512)
    monkeypatch.setattr(gguf_tensors, "PIECE", 200)
    monkeypatch.setattr(byte_ranges, "PIECE", 2048)
    file, rng = stored(made, name, tmp_path), np.random.default_rng(0)
    found = gguf_model.read_tensors(file, gguf_model.described(file)[0])
    for tensor in found.values():
        whole = np.empty(tensor.shape, np.float32)
        byte_ranges.fill(tensor, [(tuple((0, size) for size in tensor.shape), whole)])
        span = lambda size: tuple(sorted(rng.choice(size + 1, 2, replace=False).tolist()))
        boxes = [tuple(map(span, tensor.shape)) for _ in range(3)]
        wanted = [(box, np.full([b - a for a, b in box], np.nan, np.float32)) for box in boxes]
        byte_ranges.fill(tensor, wanted)
        for box, own in wanted:
            np.testing.assert_array_equal(
                own, whole[tuple(slice(*span) for span in box)], err_msg=f"{tensor.name} {box}"
            )


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_a_mesh_has_the_same_numbers(made, name, tmp_path):
    file = stored(made, name, tmp_path)
    wanted, found = models.load(file), models.load(file, mesh=make_mesh("model=2", jax.devices()[:2]))
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        assert len(ours.sharding.device_set) == 2
        np.testing.assert_array_equal(ours, theirs)


def test_a_loaded_model_takes_little_besides_what_is_kept(tmp_path, monkeypatch):
    """A matrix in four bits becomes eight times as many bytes, a piece at a time."""
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    numbers = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q4_0), raw_dtype=2)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    fields = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": 64}
    (tensor,) = gguf_model.read_tensors(tmp_path / "it.gguf", fields).values()
    monkeypatch.setattr(base, "PIECE", 1 << 16)
    monkeypatch.setattr(gguf_tensors, "PIECE", 1 << 13)
    own = np.empty(tensor.shape, np.float32)
    tracemalloc.start()
    byte_ranges.fill(tensor, [(((0, 1024), (0, 1024)), own)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < own.nbytes / 5
    order = np.arange(1024).reshape(-1, 32, 2).swapaxes(1, 2).reshape(-1)
    plain = gguf.quants.dequantize(gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q4_0), 2)
    np.testing.assert_array_equal(own, plain[order])


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_shards_are_one_model(made, name, tmp_path):
    _, folder, file = made(name)
    gguf_files.write(name, folder, tmp_path / "it.gguf", split_max_tensors=9)
    shards = sorted(tmp_path.glob("it-*.gguf"))
    assert len(shards) > 2
    wanted = models.load(file)
    for asked in (shards[0], shards[-1], tmp_path):
        found = models.load(asked)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found.params, wanted.params)))
    assert models.load(tmp_path).name == tmp_path.name
    shards[1].rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=f"is one of {len(shards)} files, and {shards[1].name} is not beside it"):
        models.load(tmp_path)
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"{shards[0].name} is not beside it; fetch it"):
        models.load(shards[-1])


def test_what_is_known_without_weights(made):
    _, folder, file = made("olmo3")
    assert close(models.abstract(file, "float32").lm.config, models.load(folder).lm.config)


def test_a_datastore_asks_a_file_for_its_tokenizer(made, tmp_path):
    """Which these have none of; `test_gguf_published.py` builds one."""
    with pytest.raises(ValueError, match="^qwen3 has no tokenizer, so it cannot read text"):
        datastore.build(["text"], str(made("qwen3")[2]), str(tmp_path / "store"))


def test_a_job_knows_a_file_again(made, tmp_path):
    file = made("qwen3")[2]
    (tmp_path / "it.gguf").write_bytes(file.read_bytes())
    assert fingerprint(tmp_path / "it.gguf") == fingerprint(file)
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "it.gguf").write_bytes(changed)
    assert fingerprint(tmp_path / "it.gguf") != fingerprint(file)


def test_settings_of_samplers_and_ends_are_the_files(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    for key, value in (
        ("context_length", 32),
        ("block_count", 1),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_uint32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    fields, _ = gguf_model.described(tmp_path / "it.gguf")
    assert generation.fields(tmp_path / "it.gguf", fields) == {"top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    assert generation.eos_ids(tmp_path / "it.gguf", fields, lambda: None) == (1,)
    assert (fields["head_dim"], fields["num_key_value_heads"], fields["rope_theta"]) == (16, 2, 10000.0)
