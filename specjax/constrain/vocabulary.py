"""The bytes that each token of a tokenizer writes."""

import dataclasses
import functools
import json
import re
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a constraint must know of a model.

    Attributes:
      tokenizer: a transformers tokenizer, or None.
      size: how many tokens the model has scores for.
      eos: ids that end a text.
      name: the model's, for errors.
      meshed: whether several devices hold the rows.
      gaps: whether texts are canvases with gaps, which are not written from left to right.
    """

    tokenizer: Any
    size: int
    eos: tuple[int, ...]
    name: str = "the model"
    meshed: bool = False
    gaps: bool = False

    def check(self) -> None:
        """Raises ValueError if constrained texts cannot be written or cannot end."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, so no constraint of its texts can be followed")
        if not self.eos:
            raise ValueError(
                f"a constrained text of {self.name} needs a token that ends it: give the model one (eos_token_id), and "
                f"leave {'ignore_eos and ends=never' if self.gaps else 'ignore_eos'} out"
            )

    @property
    def tokens(self) -> tuple[bytes | None, ...]:
        """The bytes of each token, None for those that write no text.

        Raises:
          ValueError: if the tokenizer does not join the texts of tokens one after the other.
        """
        return _tokens(self.tokenizer, self.size)

    def spelled(self, text: str) -> list[int] | None:
        """Tokens that write a text, each as long as can be; None if there are none, or for what is no text of Unicode."""
        try:
            rest = text.encode()
        except UnicodeEncodeError:  # half of a pair of surrogates
            return None
        known, found = first_of(self.tokens), []
        longest = _longest(self.tokens)
        while rest:
            size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in known), 0)
            if not size:
                return None
            found.append(known[rest[:size]])
            rest = rest[size:]
        return found


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: Any, size: int) -> tuple[bytes | None, ...]:
    backend = vars(tokenizer).get("_backend") or getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell what its tokens write, so no constraint can be followed: use a "
            "folder with a tokenizer.json"
        )
    added = backend.get_added_tokens_decoder()
    write = _writer(json.loads(backend.decoder.__getstate__()) if backend.decoder else {})
    found: list[bytes | None] = [None] * size
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token < size and token not in added:
            found[token] = write(text) or None
    for token, own in added.items():
        if token < size and not own.special:
            found[token] = own.content.encode() or None
    return tuple(found)


@functools.lru_cache(maxsize=8)
def first_of(tokens: tuple[bytes | None, ...]) -> dict[bytes, int]:
    """The first token of each text."""
    return {text: token for token, text in reversed(list(enumerate(tokens))) if text}


@functools.lru_cache(maxsize=8)
def _longest(tokens: tuple[bytes | None, ...]) -> int:
    return max((len(text) for text in tokens if text), default=0)


def _writer(decoder: Any) -> Any:
    """A function from a token's name to its bytes, by the settings of a decoder of the `tokenizers` package."""
    kinds = [own["type"] for own in decoder.get("decoders", [decoder] if decoder else [])]
    if kinds == ["ByteLevel"]:
        table = byte_level()
        return lambda text: bytes(table[sign] for sign in text) if table.keys() >= set(text) else text.encode()
    replaced = [own for own in decoder.get("decoders", []) if own["type"] == "Replace"]
    joins = all(own["pattern"] == {"String": "\u2581"} and own["content"] == " " for own in replaced)
    if kinds and joins and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        falls = "ByteFallback" in kinds
        return lambda text: _piece(text, falls)
    raise ValueError(
        f"a tokenizer that decodes by {'+'.join(kinds) or 'no rule'} does not join its tokens one after the other, so no "
        "constraint can be followed: byte-level and SentencePiece tokenizers do"
    )


def _piece(text: str, falls: bool) -> bytes:
    """The bytes of a SentencePiece token; with `falls`, tokens such as `<0x0A>` are bytes."""
    byte = BYTE.fullmatch(text) if falls else None
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()


@functools.cache
def byte_level() -> dict[str, int]:
    """The byte that each sign of a byte-level vocabulary stands for (GPT-2): printable Latin-1 signs stand for
    themselves, and the other bytes follow from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
