"""Models at URLs: their files are fetched once, and again only when they change."""

import json
import os

import chex
import fsspec
import jax
import pytest
import safetensors.numpy
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from support import jax_libraries
from support.shapes import small

from specjax import models
from specjax.jobs.manifest import fingerprint
from specjax.models import LlamaLM, ModelError, hub
from specjax.models.jax_folders import place

LM = LlamaLM(small(16, 8, 12, 2, 2, 1, 4))
PARAMS = LM.init(jax.random.key(0))
WEIGHTS = "model.safetensors"


class Bucket(MemoryFileSystem):
    """The same files at `gs://`."""

    protocol = ("gs", "gcs")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("gs://", "memory://"))


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A file system with nothing in it, and an empty cache."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return fsspec.filesystem("memory")


@pytest.fixture
def got(bucket, monkeypatch):
    """The names of the files that were fetched."""
    names, get_file = [], MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "get_file",
        lambda self, path, to, **more: (names.append(path.rpartition("/")[2]), get_file(self, path, to, **more))[1],
    )
    return names


def put(bucket, folder, to):
    for file in folder.rglob("*"):
        if file.is_file():
            bucket.pipe_file(f"{to}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def test_a_hugging_face_folder_is_fetched_once(bucket, got, tmp_path):
    models.save(tmp_path / "own", LM, PARAMS, eos_ids=(5,))
    put(bucket, tmp_path / "own", "/runs/toy")
    for name in ("consolidated.safetensors", "original/model.safetensors", "notes.bin"):
        bucket.pipe_file(f"/runs/toy/{name}", b"not read")
    model = models.load("memory://runs/toy")
    assert (model.name, model.eos_ids, sorted(got)) == ("toy", (5,), ["config.json", "generation_config.json", WEIGHTS])
    chex.assert_trees_all_equal(model.params, PARAMS)
    got.clear()
    models.load("memory://runs/toy/")
    assert got == []
    models.save(tmp_path / "own", LM, jax.tree.map(lambda x: 2 * x, PARAMS), eos_ids=(5,))
    bucket.pipe_file(f"/runs/toy/{WEIGHTS}", (tmp_path / "own" / WEIGHTS).read_bytes())  # of the same size
    again = models.load("memory://runs/toy")
    assert got == [WEIGHTS] and bool((again.params["norm"]["scale"] == 2 * PARAMS["norm"]["scale"]).all())
    (model.path / WEIGHTS).write_bytes(b"torn")
    chex.assert_trees_all_equal(models.load("memory://runs/toy").params, again.params)


def test_files_that_are_gone_are_not_read(bucket, tmp_path):
    """Shards and their index, where there is one file of other weights now; and ends of text that nothing names any more."""
    models.save(tmp_path / "own", LM, PARAMS, eos_ids=(5,))
    weights = safetensors.numpy.load_file(tmp_path / "own" / WEIGHTS)
    (tmp_path / "own" / WEIGHTS).unlink()
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for shard in set(places.values()):
        own = {name: weights[name] for name in weights if places[name] == shard}
        safetensors.numpy.save_file(own, tmp_path / "own" / shard)
    (tmp_path / "own" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    put(bucket, tmp_path / "own", "/runs/toy")
    first = models.load("memory://runs/toy")
    assert first.eos_ids == (5,)
    chex.assert_trees_all_equal(first.params, PARAMS)
    bucket.rm("/runs/toy", recursive=True)
    models.save(tmp_path / "new", LM, jax.tree.map(lambda x: 2 * x, PARAMS))
    put(bucket, tmp_path / "new", "/runs/toy")
    again = models.load("memory://runs/toy")
    chex.assert_trees_all_equal(again.params, jax.tree.map(lambda x: 2 * x, PARAMS))
    assert again.eos_ids == ()


def test_what_to_install_is_said(bucket, monkeypatch):
    def lacks(url):
        raise ImportError("HTTPFileSystem requires aiohttp")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks)
    for url, words in (("https://h/m", "requires aiohttp"), ("gs://b/m", "pip install fsspec gcsfs")):
        with pytest.raises(ModelError, match=words):
            models.load(url)


def test_orbax_folders(bucket, got, tmp_path, monkeypatch):
    """Those in a bucket that Orbax reads itself stay there, except our own; only what describes them is fetched."""
    models.save(tmp_path / "own", LM, PARAMS, layout="orbax")
    models.save(tmp_path / "plain", LM, PARAMS)
    jax_libraries.write(tmp_path / "7" / "items", jax_libraries.maxtext(tmp_path / "plain", "scanned"))
    for name in ("own", "plain", "7"):
        put(bucket, tmp_path / name, f"/runs/{name}")
    chex.assert_trees_all_equal(models.load("memory://runs/own").params, PARAMS)
    model = models.load("memory://runs/7", config="memory://runs/plain")
    chex.assert_trees_all_close(model.params, PARAMS, rtol=1e-5, atol=1e-6)
    model = models.load("memory://runs/7/items", config="memory://runs/plain/config.json")
    chex.assert_trees_all_close(model.params, PARAMS, rtol=1e-5, atol=1e-6)
    assert WEIGHTS not in got, "of a config, no weights"
    got.clear()
    for scheme in Bucket.protocol:
        monkeypatch.setitem(_registry, scheme, Bucket)
    there = hub.located("gs://runs/7")[1]
    assert os.fspath(there) == "gs://runs/7" and os.fspath(place.located(there)) == "gs://runs/7/items"
    with pytest.raises(ModelError, match="gs://runs/7 has an Orbax checkpoint and no config.json"):
        models.load("gs://runs/7")
    before = fingerprint(there)
    bucket.pipe_file("/runs/7/items/manifest.ocdbt", b"of another training")
    assert fingerprint(there) != before and got == []
    bucket.pipe_file("/runs/7/config.json", b"{}")
    assert hub.small_files(there).joinpath("config.json").read_bytes() == b"{}" and got == ["config.json"]
    assert hub.located("gs://runs/own")[1].joinpath("params", "_METADATA").is_file()


def test_gguf_files(bucket, got):
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
        bucket.pipe_file(f"/runs/{name}", b"GGUF")
    name, file = hub.located("memory://runs/a-00001-of-00002.gguf")
    assert (name, file.read_bytes(), got) == (
        "a-00001-of-00002",
        b"GGUF",
        ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
    )


def test_errors_are_one_line(bucket, monkeypatch):
    with pytest.raises(ModelError, match="there is nothing at memory://runs/none"):
        models.load("memory://runs/none")
    bucket.pipe_file("/runs/b.gguf", b"GGUF")
    with pytest.raises(ModelError, match="there is nothing at memory://runs/a.gguf"):
        models.load("memory://runs/a.gguf")
    with pytest.raises(ModelError, match="fsspec knows no file system nowhere://"):
        models.load("nowhere://runs/toy")
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *args, **more: 1 / 0)
    with pytest.raises(ModelError, match=r"memory://runs cannot be read \(division by zero\); check address"):
        models.load("memory://runs")

    def missing(url):
        raise ImportError

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        ModelError, match="URLs of gs:// need packages that are not installed: pip install fsspec gcsfs"
    ):
        models.load("gs://runs/toy")
