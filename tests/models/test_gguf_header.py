"""Headers of GGUF files: what is damaged, cut, too new or too large is one line, and nothing else is ever raised."""

import struct
import sys

import numpy as np
import pytest

from specjax import models
from specjax.models import ModelError
from specjax.models.gguf import header, ropes
from specjax.models.gguf.types import TYPES


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, sizes, kind, offset):
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


ARCHITECTURE = key("general.architecture", 8, text("llama"))
TABLE = tensor("token_embd.weight", (32, 4), 2, 0)


def file(path, keys=(ARCHITECTURE,), tensors=(TABLE,), data=4 * 18, version=3, counts=None):
    """Writes a file from its parts; `data` bytes follow the header."""
    count = (len(tensors), len(keys)) if counts is None else counts
    start = b"GGUF" + struct.pack("<I2Q", version, *count) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(start + bytes(-len(start) % 32) + bytes(data))
    return path


def said(path):
    """The line of the error that reading a file raises."""
    with pytest.raises(ModelError) as caught:
        models.load(path)
    line = str(caught.value)
    assert "\n" not in line and str(path.parent) in line
    return line


def test_a_header_is_walked(tmp_path):
    every = (
        ARCHITECTURE,
        *(key(f"of.{kind}", kind, struct.pack(f"<{code}", 1)) for kind, code in header._SCALARS.items()),
        key("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("ö")),
        key("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
        key("general.alignment", 4, struct.pack("<I", 64)),
    )
    two = TABLE, tensor("norm", (5,), 0, 128)
    start = len(b"".join((*every, *two))) + 24
    path = tmp_path / "it.gguf"
    path.write_bytes(file(path, every, two, 0).read_bytes()[:start] + bytes(-start % 64) + bytes(128 + 20))
    found = header.read(path)
    assert found.metadata["words"] == ["a", "ö"] and found.metadata["numbers"] == [1, -2, 3]
    assert [found.metadata[f"of.{kind}"] for kind in header._SCALARS] == [1] * 11 and found.architecture == "llama"
    begin = start + -start % 64
    assert [(t.shape, t.offset, t.size) for t in found.tensors.values()] == [
        ((4, 32), begin, 72),
        ((5,), begin + 128, 20),
    ]


def test_a_file_that_ends_early_is_found_wherever_it_ends(tmp_path):
    whole = file(tmp_path / "it.gguf").read_bytes()
    assert header.read(tmp_path / "it.gguf").tensors
    for size in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        line = said(tmp_path / "cut.gguf")
        assert "truncated" in line or "not a GGUF file" in line, size


def test_whatever_a_byte_is_changed_to_is_read_or_is_one_line(tmp_path):
    whole, rng = bytearray(file(tmp_path / "it.gguf").read_bytes()), np.random.default_rng(0)
    for _ in range(400):
        own = whole.copy()
        for at in rng.integers(0, len(whole) - 72, rng.integers(1, 4)):
            own[at] = rng.integers(256)
        (tmp_path / "it.gguf").write_bytes(own)
        try:
            header.read(tmp_path / "it.gguf")
        except ModelError as error:
            assert "\n" not in str(error)


HUGE = 1 << 60
WRONG = {
    "letters": ({}, "not a GGUF file"),
    "old": ({"version": 1}, "has version 1 of GGUF; 2 and 3 are read"),
    "new": ({"version": 4}, "has version 4 of GGUF"),
    "big-endian": ({"version": 3 << 24}, "is a big-endian GGUF file"),
    "tensors": ({"counts": (HUGE, 1)}, "truncated, or damaged: a header of 1152921504606846976 tensors"),
    "keys": ({"counts": (1, HUGE)}, "truncated, or damaged"),
    "string": ({"keys": (key("general.architecture", 8, struct.pack("<Q", HUGE)),)}, "truncated, or damaged: general.arch"),
    "array": ({"keys": (key("a", 9, struct.pack("<IQ", 4, HUGE)),)}, "truncated, or damaged: a does not fit"),
    "strings": ({"keys": (key("a", 9, struct.pack("<IQ", 8, HUGE)),)}, "truncated, or damaged: a does not fit"),
    "nested": ({"keys": (key("a", 9, struct.pack("<IQ", 9, 1)),)}, "a is an array of the type 9, which is not read"),
    "value": ({"keys": (key("a", 99, b""),)}, "a has the unknown type 99; the file is damaged, or newer"),
    "twice": ({"keys": (ARCHITECTURE, ARCHITECTURE)}, "the key 'general.architecture' comes twice"),
    "type": ({"tensors": (tensor("t", (32,), 99, 0),)}, "the tensor 't' has the type 99, which is not read"),
    "integers": ({"tensors": (tensor("t", (32,), 26, 0),)}, "the tensor 't' has the type 26, which is not read"),
    "dimensions": ({"tensors": (tensor("t", (1,) * 5, 0, 0),)}, "the tensor 't' has 5 dimensions"),
    "size": ({"tensors": (tensor("t", (HUGE, HUGE), 0, 0),)}, "the tensor 't' of F32 has the sizes"),
    "nothing": ({"tensors": (tensor("t", (0,), 0, 0),)}, "the tensor 't' of F32 has the sizes"),
    "block": ({"tensors": (tensor("t", (33,), 2, 0),)}, "the tensor 't' of Q4_0 has the sizes"),
    "same name": ({"tensors": (TABLE, TABLE)}, "the tensor 'token_embd.weight' comes twice"),
    "gap": ({"tensors": (TABLE, tensor("t", (1,), 0, 128))}, "the tensor 't' lies at 128, not at 96"),
    "outside": ({"data": 71}, "truncated: token_embd.weight lies outside its"),
    "large": ({"tensors": (tensor("t", (1 << 50,), 0, 0),)}, "truncated: t lies outside its"),
    "alignment": (
        {"keys": (key("general.alignment", 4, struct.pack("<I", 48)),)}, "general.alignment must be a power of two, not 48",
    ),
    "no model": ({"keys": ()}, "does not name an architecture"),
    "architecture": (
        {"keys": (key("general.architecture", 8, text("rwkv7")),)}, "has the architecture 'rwkv7'; supported are",
    ),
    "no size": ({}, "llama.attention.head_count must be a positive number, not None"),
    "no table": ({"tensors": ()}, "has no token_embd.weight"),
    "unknown": (
        {"keys": (ARCHITECTURE, key("llama.attention.frob", 6, struct.pack("<f", 2)))},
        "llama.attention.frob is 2.0, which is not read",
    ),
    "window": (
        {"keys": (key("general.architecture", 8, text("qwen2")), key("qwen2.attention.sliding_window", 0, bytes([9])))},
        "qwen2.attention.sliding_window is 9, which is not read",
    ),
    "shards": ({"keys": (ARCHITECTURE, key("split.count", 2, struct.pack("<H", 3)))}, "must end in -00001-of-00003.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_in_a_line(what, tmp_path):
    parts, line = WRONG[what]
    path = file(tmp_path / "it.gguf", **parts)
    if what == "letters":
        path.write_bytes(b"GGML" + path.read_bytes()[4:])
    assert line in said(path)


def test_the_sizes_of_blocks_are_those_of_ggml():
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    for code, own in TYPES.items():
        kind = gguf.GGMLQuantizationType(code)
        assert (own.name, (own.block, own.bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


# bytes (37 i + 11) % 256 but for float16 scales of 0.5 and minima of -1, or exponents of 126; by hand from ggml-common.h
BLOCKS = {
    "Q4_0": ({0: 0, 1: 56}, [-1.5, 1, 3.5, -2, 0.5, 3, -2.5, 0, 2.5, -3, -0.5, 2, -3.5, -1, 1.5, -4, -1.5, -0.5]),
    "Q4_1": ({0: 0, 1: 56, 2: 0, 3: 188}, [6.5, 1, 3.5, 6, 0.5, 3, 5.5, 0, 2.5, 5, -0.5, 2, 4.5, -1, 1.5, 4, 3.5, 5]),
    "Q5_0": ({0: 0, 1: 56}, [4.5, -1, 1.5, -4, 6.5, -7, 3.5, -2, -7.5, 3, -2.5, 0, 2.5, 5, 7.5, -6, 7, 0]),
    "IQ4_NL": ({0: 0, 1: 56}, [-17.5, 12.5, 56.5, -24.5, 6.5, 44.5, -32.5, 0.5, 34.5, -41.5, -5, 26.5, -52, -11, 19]),
    "MXFP4": (
        {0: 126},
        [0, 1.5, -0.5, -3, 1, -0.25, -2, 0.75, 0, -1.5, 0.5, 3, -1, 0.25, 2, -0.75, 0.75, 1.5, 3, -0.25],
    ),
}
SUMS = {"Q2_K": 19.046875, "Q3_K": 14.96875, "Q4_K": 784.625, "Q5_K": 1749.875, "Q6_K": 72.0625, "IQ4_XS": -171.953125}
"""Of 256 numbers, with every scale of a block 1/64."""
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Where those are."""


@pytest.mark.parametrize("name", [*BLOCKS, *SUMS])
def test_blocks_are_made_plain(name):
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    kind = next(own for own in TYPES.values() if own.name == name)
    block = (37 * np.arange(kind.bytes) + 11) % 256
    if name in BLOCKS:
        changed, wanted = BLOCKS[name]
        for at, byte in changed.items():
            block[at] = byte
        np.testing.assert_array_equal(kind.numbers(block.astype(np.uint8)[None])[0, : len(wanted)], wanted)
    else:
        for at in SCALES[name]:
            block[at : at + 2] = np.array([1 / 64], np.float16).view(np.uint8)
        assert kind.numbers(block.astype(np.uint8)[None]).sum(dtype=np.float64) == SUMS[name]


def test_a_rope_of_llama_3_is_found_from_its_divisors(tmp_path):
    own = header.Header(tmp_path / "it.gguf", {}, {})
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128) / (2 * np.pi)
    for factor, low, high, original in (
        (8.0, 1.0, 4.0, 8192),
        (32.0, 1.0, 4.0, 8192),
        (4.0, 1.0, 3.0, 2048),
        (2.0, 2.0, 8.0, 4096),
    ):
        divisors = ropes._divisors(frequencies, factor, low, high, original).astype(np.float32)
        found = ropes.llama3(divisors, 128, 500000.0, own)
        assert found["factor"] == factor
        named = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        np.testing.assert_allclose([found[name] for name in named], [1.0, high / low, original / low], rtol=1e-3)
    with pytest.raises(ModelError, match="match no supported rope"):
        ropes.llama3(np.linspace(1, 7, 64), 128, 500000.0, own)
    with pytest.raises(ModelError, match="has 32 numbers for 64 frequencies"):
        ropes.llama3(np.ones(32), 128, 500000.0, own)
    assert ropes.llama3(np.ones(64), 128, 500000.0, own) == {"rope_type": "default"}


def test_blocks_without_the_package_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="are read with the package gguf: pip install gguf"):
        TYPES[2].numbers(np.zeros((1, 18), np.uint8))
    np.testing.assert_array_equal(TYPES[30].numbers(np.array([[0x80, 0x3F]], np.uint8)), [[1.0]])
