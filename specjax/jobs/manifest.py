"""The identity of a job as one JSON object: model, decoding, sampling, seed, input and order."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.assembly.line import values
from specjax.models.gguf.finding import is_gguf, shards
from specjax.models.jax_folders.place import located

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_GGUF_HEADER = 1 << 23  # bytes, enough for a vocabulary of 262,144 tokens
_NOT_IN_WORDS = object()


def fingerprint(folder: Path) -> str:
    """A cheap hash of a model folder, or of a GGUF file with its shards.

    It covers configuration and tokenizer in full. Of every weights file (safetensors, GGUF or Orbax), it covers the
    size, the beginning and a few stretches, so that two trainings of one architecture differ. Of an Orbax checkpoint in a
    bucket, it covers the small files, which Orbax writes with times and the names that it draws for others."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir() if folder.is_dir() else shards(folder)):
        if file.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken"):
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix == ".safetensors":
            digest.update(f"{file.name}\n".encode() + _stretches(file, _header_bytes(file)))
        elif not folder.is_dir():
            digest.update(_stretches(file, _GGUF_HEADER))
        elif file.name == "params" and file.is_dir():
            for part in sorted(part for part in file.rglob("*") if part.is_file()):
                digest.update(f"{part.relative_to(folder)}\n".encode() + _stretches(part, _SAMPLE_BYTES))
    checkpoint = located(folder) if folder.is_dir() else None
    if checkpoint is not None:
        local = isinstance(checkpoint, Path)
        parts = checkpoint.rglob("*") if local else checkpoint.iterdir()
        for part in sorted(part for part in parts if part.is_file()):
            content = _stretches(part, _SAMPLE_BYTES) if local else part.read_bytes()
            digest.update(f"{part.relative_to(folder)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _header_bytes(file: Path) -> int:
    with file.open("rb") as data:
        return 8 + int.from_bytes(data.read(8), "little")


def _stretches(file: Path, start: int) -> bytes:
    """A digest of a file's size, its first bytes, and stretches of the rest."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as data:
        digest.update(data.read(min(start, size)))
        for i in range(_SAMPLES):
            data.seek(start + max(0, size - start - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.digest()


def named_folders(lines: Sequence[Any]) -> dict[str, str]:
    """A fingerprint of every folder or GGUF file that a line such as `eagle1:model=FOLDER` names."""
    named = [value for line in lines if isinstance(line, str) for value in values(line)]
    return {value: fingerprint(Path(value)) for value in named if Path(value).is_dir() or is_gguf(Path(value))}


def hash_json(content: Any) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def hash_list(values: Iterable[Any]) -> str:
    """`hash_json` of a list whose values come one by one.

    >>> hash_list(iter([1, {"a": "b"}])) == hash_json([1, {"a": "b"}])
    True
    """
    digest = hashlib.sha256(b"[")
    for number, value in enumerate(values):
        digest.update((", " if number else "").encode() + json.dumps(value).encode())
    digest.update(b"]")
    return digest.hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The differences of two manifests, one phrase per field.

    >>> differences({"seed": 0, "input": {"sha256": "a"}}, {"seed": 1, "input": {"sha256": "a"}})
    ['seed (0 there, 1 here)']
    """
    found = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, _NOT_IN_WORDS), new.get(key, _NOT_IN_WORDS)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key} ")
        elif before != after:
            short, whole = ((_words(before, most), _words(after, most)) for most in (_SHORT, 10 * _SHORT))
            there, here = whole if short[0] == short[1] else short
            found.append(f"{prefix}{key} ({there} there, {here} here)")
    return found


_SHORT = 40


def _words(value: Any, most: int) -> str:
    if value is _NOT_IN_WORDS:
        return "not given"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= most else text[: most - 24] + "..." + text[-8:]
