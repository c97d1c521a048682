"""Weights as an Orbax checkpoint: the same parameters and text on any mesh, and one clear error for each bad folder."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import pytest
from support import jax_libraries
from support.conformance import CONFIG, TARGET, params

from specjax import cli, models
from specjax.jobs.manifest import fingerprint
from specjax.models import ModelError, checksums, orbax_folder, saving
from specjax.models.kv_heads import merged
from specjax.sharding import make_mesh

MESHES = (None, "model=8", "data=8")
TOY = params()["target"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The toy model of the conformance tests, saved from a mesh."""
    folder = tmp_path_factory.mktemp("orbax") / "toy"
    lm, spread = models.spread(TARGET, TOY, make_mesh("data=2,model=4"))
    models.save(folder, lm, spread, eos_ids=(95,), layout="orbax")
    return folder


@pytest.fixture
def toy(saved, tmp_path):
    """A folder that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "toy")


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("spec", MESHES)
def test_parameters_are_the_same_on_every_mesh(saved, spec):
    mesh = make_mesh(spec)
    model = models.load(saved, mesh=mesh)
    assert (model.lm.config, model.eos_ids, model.name) == (CONFIG, (95,), "toy")
    assert model.lm.kv_copies == (2 if spec == "model=8" else 1)
    chex.assert_trees_all_equal(merged(model.params, CONFIG, model.lm.kv_copies), TOY)
    if mesh is not None:
        _, spread = models.spread(TARGET, TOY, mesh)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, model.params, spread))


def test_types_change_when_written_and_when_read(saved, tmp_path):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TOY)
    read = models.load(saved, dtype="bfloat16")
    assert read.params["norm"]["scale"].dtype == jnp.bfloat16
    chex.assert_trees_all_equal(read.params, half)
    wide = models.load(saved, mesh=make_mesh("model=8"))  # with copies of kv-heads, which are not written
    models.save(tmp_path / "half", wide.lm, wide.params, dtype="bfloat16", layout="orbax")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    chex.assert_trees_all_equal(
        models.load(tmp_path / "half").params, jax.tree.map(lambda x: x.astype(jnp.float32), half)
    )


@pytest.mark.slow
def test_two_hosts_save_and_restore_together(tmp_path):
    models.save(tmp_path / "plain", TARGET, TOY)
    jax_libraries.write(tmp_path / "maxtext", jax_libraries.maxtext(tmp_path / "plain", "scanned"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    worker = Path(__file__).parents[1] / "support" / "orbax_on_two_hosts.py"
    words = [sys.executable, "-W", "error::UserWarning", str(worker), str(tmp_path), str(port)]
    running = [subprocess.Popen([*words, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    try:
        said = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running]
    finally:
        for process in running:
            process.kill()
    for one in said:
        assert one["checksums"] == ["params.crc32.0.json", "params.crc32.1.json"]
        assert "is not a whole Orbax checkpoint" in one["damaged"]
        assert one["copies"] == 2 and one["same"] == 4 * len(jax.tree.leaves(TOY))
        assert "one writes safetensors: save them as orbax" in one["refused"]
    chex.assert_trees_all_equal(models.load(tmp_path / "orbax").params, TOY)


def test_folders_that_are_not_free(saved, tmp_path):
    save = lambda folder, **more: models.save(folder, TARGET, TOY, layout="orbax", **more)
    with pytest.raises(ModelError, match="toy exists and is not empty; choose another folder"):
        save(saved)
    with pytest.raises(ModelError, match="config.json is a file"):
        save(saved / "config.json")
    with pytest.raises(ModelError, match="unknown layout 'zip'; choose safetensors, orbax"):
        models.save(tmp_path / "it", TARGET, TOY, layout="zip")
    assert not (tmp_path / "it").exists()


def test_what_was_interrupted_does_not_load(toy, tmp_path, monkeypatch):
    (toy / "config.json").unlink()  # killed before the last file
    with pytest.raises(ModelError, match="toy is half written: saving it was interrupted; delete it"):
        models.load(toy)
    with pytest.raises(ModelError, match="is half written"):
        models.save(toy, TARGET, TOY, layout="orbax")
    (toy / "params").rename(toy / "params.orbax-checkpoint-tmp")  # killed while Orbax wrote
    with pytest.raises(ModelError, match="is half written"):
        models.load(toy)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "beside", stop)
    with pytest.raises(KeyboardInterrupt):
        models.save(tmp_path / "new", TARGET, TOY, layout="orbax")
    assert not (tmp_path / "new").exists()


def test_other_folders_with_a_file_params_json(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelError, match="has no config.json; give a Hugging Face model folder"):
        models.load(tmp_path)
    models.save(tmp_path / "it", TARGET, TOY)
    (tmp_path / "it" / "model.safetensors").rename(tmp_path / "it" / "params.bin")
    with pytest.raises(ModelError, match="has neither model.safetensors nor .*; convert its .bin weights"):
        models.load(tmp_path / "it")


def test_what_is_not_the_checkpoints_fault(toy, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(orbax_folder, "_read", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        models.load(toy)


def test_all_processes_restore_in_the_same_groups():
    """Each group ends with a barrier, so one more in a process would leave the others waiting."""
    device = lambda process: SimpleNamespace(process_index=process)
    wanted = {name: jax.ShapeDtypeStruct((size, 1 << 20), "float32") for name, size in (("a", 1024), ("b", 16))}
    groups = []
    for own in (1, 3):
        place = SimpleNamespace(
            device_set=[device(0), *[device(1)] * 3], addressable_devices=[device(own)] * own, shard_shape=lambda x: x
        )
        groups.append(orbax_folder._groups(wanted, wanted, dict.fromkeys(wanted, place)))
    assert groups[0] == groups[1]


def test_a_config_that_does_not_fit_names_every_parameter(toy):
    edit(toy, vocab_size=97, tie_word_embeddings=False)
    with pytest.raises(ModelError) as error:
        models.load(toy)
    text = str(error.value)
    assert "embed.embedding has shape [96, 64], config.json says [97, 64]" in text
    assert "missing head.kernel [64, 97]" in text and "\n" not in text
    edit(toy, vocab_size=96, tie_word_embeddings=True, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"does not fit config.json: unknown layers.2.attention.k.kernel \[64, 32\]"):
        models.load(toy)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGE = {
    "a bit that flipped": (flip, "has changed since it was written"),
    "a file that was cut": (lambda file: file.write_bytes(file.read_bytes()[:-7]), "bytes and had"),
    "a file that is gone": (lambda file: file.unlink(), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line_before_orbax_reads(toy, kind, capfd):
    damage, message = DAMAGE[kind]
    chunks = max((toy / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    for file in (chunks, toy / "params" / "_METADATA", toy / "params" / "manifest.ocdbt"):
        content = file.read_bytes()
        damage(file)
        with pytest.raises(ModelError) as error:
            models.load(toy)
        said = str(error.value)
        assert f"params is not a whole Orbax checkpoint (params/{file.relative_to(toy / 'params')} " in said
        assert message in said and said.endswith("; save the model again")
        file.write_bytes(content)
    assert models.load(toy).lm.config == CONFIG and capfd.readouterr().err == ""


def test_large_files_have_a_checksum_a_piece_and_processes_share_them(toy, monkeypatch):
    asked, sums = [], checksums._sums
    monkeypatch.setattr(checksums, "_sums", lambda spans: asked.append(spans) or sums(spans))
    monkeypatch.setattr(checksums, "PIECE", 1000)
    (note,) = toy.glob("params.crc32.*.json")
    assert "pieces of another size" in checksums._problem(toy, "params", 0, 1)
    checksums.write(toy, "params")
    (whole,) = asked
    assert len(whole) > sum(file.stat().st_size for file in (toy / "params").rglob("*") if file.is_file()) / 1000
    assert checksums._problem(toy, "params", 0, 2) is None is checksums._problem(toy, "params", 1, 2)
    assert sorted(asked[1] + asked[2]) == sorted(whole) and not {*asked[1]} & {*asked[2]}
    note.write_text('{"files": []}')
    assert checksums._problem(toy, "params", 0, 1) == "params.crc32.0.json is damaged"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_without_checksums(toy):
    """It loads. Damage that Orbax finds is an error, beside what it leaves unheard: where one read fails, it closes the event
    loop under the others."""
    (toy / "params.crc32.0.json").unlink()
    for name in ("_METADATA", "manifest.ocdbt"):
        file = toy / "params" / name
        content = file.read_bytes()
        file.write_bytes(b"{")
        with pytest.raises(ModelError, match=r"params is not a whole Orbax checkpoint \(.*\); save the model again"):
            models.load(toy)
        file.write_bytes(content)
    assert models.load(toy).lm.config == CONFIG


def test_a_fingerprint_sees_other_weights(saved, toy, tmp_path):
    assert fingerprint(saved) == fingerprint(toy)
    models.save(tmp_path / "other", TARGET, jax.tree.map(lambda x: 2 * x, TOY), layout="orbax")
    shutil.rmtree(toy / "params")
    shutil.copytree(tmp_path / "other" / "params", toy / "params")
    assert fingerprint(saved) != fingerprint(toy)


def test_convert_refuses_before_any_work(toy, tmp_path, capsys):
    for words, message in (
        ((toy, toy), "toy exists and is not empty; choose another folder, or delete it first"),
        ((toy, tmp_path / "x", "--layout", "zip"), "unknown layout 'zip'; choose safetensors, orbax"),
        ((toy, tmp_path / "x", "--mesh", "model=3"), "mesh 'model=3' asks for 3 devices and there are 8 devices"),
        ((tmp_path / "no", tmp_path / "x"), "unknown model"),
    ):
        assert cli.main(["convert", *map(str, words)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_convert(tmp_path, capsys):
    there, back = tmp_path / "orbax", tmp_path / "again"
    assert cli.main(["convert", "tiny-draft", str(there), "--dtype", "float32"]) == 0
    assert f"tiny-draft is in {there} (orbax, float32); use it with --model {there}" in capsys.readouterr().err
    assert orbax_folder.is_one(there)
    wanted, got = models.load("tiny-draft"), models.load(there)
    chex.assert_trees_all_equal(got.params, wanted.params)
    assert (got.lm, got.eos_ids) == (wanted.lm, wanted.eos_ids)
    assert got.tokenizer("def f(x):")["input_ids"] == wanted.tokenizer("def f(x):")["input_ids"]
    assert cli.main(["convert", str(there), str(back), "--layout", "safetensors", "--mesh", "model=8"]) == 0
    chex.assert_trees_all_equal(models.load(back).params, wanted.params)
