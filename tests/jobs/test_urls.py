"""Jobs whose prompts and records are at URLs."""

import gzip
import json

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from specjax import cli
from specjax.jobs import files, jsonl, urls

PROMPTS = [{"prompt": "1, 2,", "id": "a"}, {"prompt": "hen, dog,", "id": "b"}]
LINES = "".join(json.dumps(one) + "\n" for one in PROMPTS).encode()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A file system with two prompts, and an empty cache."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    found = fsspec.filesystem("memory")
    found.pipe_file("/job/in.jsonl", LINES)
    found.pipe_file("/job/in.jsonl.gz", gzip.compress(LINES))
    return found


@pytest.mark.parametrize("name", ("in.jsonl", "in.jsonl.gz"))
def test_prompts_are_read(bucket, name):
    kind = files.packed(name) or jsonl
    assert [(line.prompt, line.id) for line in urls.read(f"memory://job/{name}", kind)] == [
        ("1, 2,", "a"),
        ("hen, dog,", "b"),
    ]
    with pytest.raises(ValueError, match="there is nothing at memory://job/none.jsonl"):
        urls.read("memory://job/none.jsonl", jsonl)


def test_a_file_system_that_fails_is_one_line(bucket, monkeypatch):
    def refuses(self, path, **more):
        raise PermissionError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "exists", refuses)
    with pytest.raises(ValueError, match=r"memory://job/out.jsonl cannot be read \(no credentials\)"):
        files.check_output("memory://job/out.jsonl", None)


def test_outputs_are_checked(bucket):
    with pytest.raises(ValueError, match="the output file 'memory://job/in.jsonl' exists: move it away"):
        files.check_output("memory://job/in.jsonl", None)
    with pytest.raises(ValueError, match="must not be the --input file"):
        files.check_output("memory://job/in.jsonl", "memory://job/in.jsonl")
    with pytest.raises(ValueError, match="fsspec knows no file system nowhere://"):
        files.check_output("nowhere://job/out.jsonl", None)
    files.check_output("memory://job/out.jsonl", "memory://job/in.jsonl")


@pytest.mark.slow
@pytest.mark.covers("generate")
def test_a_job(bucket):
    words = ["generate", "--max-new-tokens", "4", "--input", "memory://job/in.jsonl", "--output"]
    for name, unpack in (("out.jsonl", bytes), ("out.jsonl.gz", gzip.decompress)):
        for _ in range(2):  # the second has nothing left to do
            assert cli.main([*words, f"memory://job/{name}"]) == 0
            records = [json.loads(line) for line in unpack(bucket.cat_file(f"/job/{name}")).splitlines()]
            assert [(one["id"], one["new_tokens"]) for one in records] == [("a", 4), ("b", 4)]
