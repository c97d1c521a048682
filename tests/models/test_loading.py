"""Loading reads the byte ranges of this host's shards, in pieces, and holds little beside them."""

import dataclasses
import io
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from support import big_folder
from support.shapes import small

from specjax import models
from specjax.models import LlamaLM, ModelError, byte_ranges, loading_bar
from specjax.models.kv_heads import copied
from specjax.models.tensors import FLOATS, read_header
from specjax.sharding import make_mesh

CODES = {dtype: code for code, dtype in FLOATS.items()}
SMALL = small(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, qkv_bias=True,
)  # fmt: skip


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of some rows, and not of whole matrices; and what was asked of files, in bytes."""
    asked, exactly = [], byte_ranges._read_exactly
    monkeypatch.setattr(byte_ranges, "PIECE", 100)
    monkeypatch.setattr(
        byte_ranges, "_read_exactly", lambda *args: (asked.append(args[-1].nbytes), exactly(*args))[1]
    )  # fmt: skip
    return asked


def stored(folder, shape, dtype=np.float32, seed=0):
    """A tensor after another one in a file, and its numbers."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    size, code = array.nbytes, CODES[array.dtype]
    header = {
        "before": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "it": {"dtype": code, "shape": list(shape), "data_offsets": [12, 12 + size]},
    }
    text = json.dumps(header).encode()
    file = folder / f"{code}-{len(shape)}-{seed}.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12) + array.tobytes())
    return read_header(file)["it"], array


def sliced(array, box):
    return array[tuple(slice(*span) for span in box)]


@pytest.mark.parametrize("shape", [(), (7,), (11, 13), (3, 11, 13), (2, 3, 5, 7)], ids=len)
def test_boxes_are_read_as_numpy_slices_them(tmp_path, shape, small_pieces):
    rng = np.random.default_rng(1)
    pairs = ("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")
    for i, (kind, into) in enumerate(pairs):
        tensor, array = stored(tmp_path, shape, kind, seed=i)
        whole = tuple((0, size) for size in shape)
        some = [tuple(tuple(sorted(rng.choice(size + 1, 2, replace=False))) for size in shape) for _ in range(6)]
        boxes = [whole, *some]
        got = [np.full([b - a for a, b in box], np.nan, into) for box in boxes]
        turned = [np.full(own.shape[::-1], np.nan, into) for own in got]  # a parameter that is stored transposed
        byte_ranges.fill(tensor, [*zip(boxes, got, strict=True), *zip(boxes, [own.T for own in turned], strict=True)])
        for box, own, other in zip(boxes, got, turned, strict=True):
            np.testing.assert_array_equal(own, sliced(array, box).astype(into))
            np.testing.assert_array_equal(other.T, own)


def test_only_what_is_asked_for_is_read_and_once(tmp_path, small_pieces):
    tensor, array = stored(tmp_path, (40, 30), ml_dtypes.bfloat16)
    own = [np.empty((40, 4), np.float32) for _ in range(3)]
    byte_ranges.fill(tensor, list(zip([((0, 40), (a, a + 4)) for a in (2, 20, 6)], own, strict=True)))
    assert sum(small_pieces) == 40 * 12 * 2 and max(small_pieces) <= byte_ranges.PIECE
    np.testing.assert_array_equal(own[2], array[:, 6:10].astype(np.float32))


@pytest.mark.parametrize("spec", ["model=8", "data=2,model=4", None])
def test_shards_are_those_of_the_whole(tmp_path, spec, small_pieces):
    """Copies of kv-heads too, where the model axis is wider than there are kv-heads."""
    lm = LlamaLM(SMALL)
    params = jax.tree.map(lambda x: np.random.default_rng(x.size).standard_normal(x.shape, np.float32), lm.abstract())
    models.save(tmp_path / "it", lm, params)
    small_pieces.clear()
    model = models.load(tmp_path / "it", dtype="float32", mesh=make_mesh(spec))
    assert sum(small_pieces) == sum(x.nbytes for x in jax.tree.leaves(params))  # once, whoever has it
    assert model.lm.kv_copies == (2 if spec == "model=8" else 1)
    wanted = copied(params, SMALL, model.lm.kv_copies)
    jax.tree.map(np.testing.assert_array_equal, model.params, jax.tree.map(np.asarray, wanted))
    if spec:
        other, spread = models.spread(lm, params, make_mesh(spec))
        assert other == model.lm
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, model.params, spread))
        jax.tree.map(np.testing.assert_array_equal, model.params, spread)


def test_what_is_stored_twice_is_compared_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_ranges, "PIECE", 8 * 10)
    one, other = stored(tmp_path, (9, 7))[0], stored(tmp_path, (9, 7), seed=1)[0]
    half = stored(tmp_path, (9, 7), ml_dtypes.bfloat16)[0]
    assert byte_ranges.equal(one, one) and not byte_ranges.equal(one, other) and not byte_ranges.equal(one, half)
    content = bytearray(one.file.read_bytes())
    content[-1] ^= 1  # its last number, in the seventh piece of ten numbers
    spoilt = dataclasses.replace(one, file=one.file.with_name("spoilt"))
    spoilt.file.write_bytes(content)
    assert [byte_ranges.equal(one, spoilt, (i, 3)) for i in range(3)] == [False, True, True]
    assert not byte_ranges.equal(one, dataclasses.replace(one, shape=(7, 9)))


def test_a_file_that_was_cut_meanwhile(tmp_path):
    tensor, _ = stored(tmp_path, (9, 7))
    tensor.file.write_bytes(tensor.file.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"F32-2-0.safetensors is truncated: it lies outside it"):
        byte_ranges.read(byte_ranges.Source(tensor, True), np.float32)


@pytest.mark.parametrize("layout", ["safetensors", "orbax"])
def test_parameters_lie_on_the_default_device(tmp_path, layout):
    lm = LlamaLM(SMALL)
    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape), lm.abstract())
    models.save(tmp_path / "it", lm, zeros, layout=layout)
    with jax.default_device(jax.devices()[3]):
        params = models.load(tmp_path / "it").params
    assert {x.device for x in jax.tree.leaves(params)} == {jax.devices()[3]}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("total", [4, None])
def test_a_bar_comes_after_a_while_and_on_a_terminal_only(monkeypatch, total):
    monkeypatch.setenv("TERM", "xterm")

    def shown(stream, patience, wait=0.0):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(loading_bar, "PATIENCE", patience)
        with loading_bar.bar("loading it", total) as advance:
            time.sleep(wait)
            advance(3)
            time.sleep(wait)
        return stream.getvalue()

    assert shown(Terminal(), 60.0) == "" == shown(io.StringIO(), 0.0, 0.01)
    text = shown(Terminal(), 0.0, 0.15)
    assert "loading it" in text and ("75%" in text) == (total == 4)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Two folders of 2 GB; they are deleted at the end."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc, which says what a process holds: run it on Linux")
    home = tmp_path_factory.mktemp("big")
    if shutil.disk_usage(home).free < 5e9:
        pytest.skip(f"needs 5 GB of disk under {home}: free them, or point --basetemp elsewhere")
    big_folder.write(home / "wide", np.float32, 8)
    yield home / "wide"
    shutil.rmtree(home)


def run(folder, mesh, dtype, processes=1):
    """What each process says of itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, big_folder.__file__, str(folder), mesh, dtype]
    more = [[]] if processes == 1 else [[str(port), str(i), str(processes)] for i in range(processes)]
    running = [subprocess.Popen([*words, *own], stdout=subprocess.PIPE, text=True) for own in more]
    try:
        said = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "dtype"), [("", "float32"), ("model=8", "bfloat16")])
def test_a_host_holds_little_beside_its_shards(big, mesh, dtype):
    """At its peak, converted or not, with two copies of every kv-head on the wide mesh."""
    (said,) = run(big, mesh, dtype)
    assert said["copies"] == (2 if mesh else 1) and said["right"] > 500_000
    assert said["own"] > (1.9e9 if dtype == "float32" else 0.95e9)
    assert said["grown"] < 1.3 * said["own"]
    assert said["read"] < 1.02 * (big / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_each_of_two_hosts_reads_and_holds_its_half(big):
    whole = (big / "model.safetensors").stat().st_size
    for said in run(big, "model=8", "float32", processes=2):
        assert 0.45 * whole < said["read"] < 0.55 * whole
        assert said["grown"] < 1.3 * said["own"] < 1.3 * 0.55 * whole
        assert said["right"] > 500_000
