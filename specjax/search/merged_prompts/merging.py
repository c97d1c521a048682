"""Which tokens of some texts are read as one: the most frequent pair is merged again and again, as BPE does.

In the shape descriptions `V` denotes the vocabulary.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.constrain.vocabulary import byte_level

BOUNDARIES = "pretokens", "word", "sentence"
"""What no merged token crosses: what the tokenizer splits first, words between white space, or special tokens alone."""
_SPACES = "ĉĠĊ"  # a tab, a space and the end of a line, as byte-level vocabularies write them

Unit = str | int
"""A token by its signs in a byte-level vocabulary, or merged ones; a special token by its id."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """Texts after merging.

    Attributes:
      rows: the ids of every text. V and beyond are merged tokens: V + n is the n-th one.
      parts: of every merged token, the ids of the tokens that the tokenizer makes of its signs.
    """

    rows: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Merger:
    """Merges pairs of adjacent tokens that are frequent in a batch of texts.

    Pairs are counted over all rows; the most frequent one is merged everywhere, from left to right, and the first
    seen one of equally frequent ones. A pair is not counted if the merged token would cross the boundary, holds a
    special token, or has white space after its first place; white space alone may be merged, but not two ends of
    lines.

    Attributes:
      tokenizer: of the model, byte-level.
      boundary: one of `BOUNDARIES`.

    Raises:
      ValueError: for another boundary, or a tokenizer of another kind.
    """

    tokenizer: Any
    boundary: str = "pretokens"

    def __post_init__(self):
        if self.boundary not in BOUNDARIES:
            raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}, got {self.boundary!r}")
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.pre_tokenizer is None or type(backend.decoder).__name__ != "ByteLevel":
            raise ValueError(
                "tokens are merged by their signs in a byte-level vocabulary, and this model has "
                f"{'no tokenizer' if self.tokenizer is None else 'another kind of tokenizer'}: decode otherwise"
            )

    @functools.cached_property
    def _splits(self):
        from tokenizers import pre_tokenizers

        own = self.tokenizer.backend_tokenizer.pre_tokenizer
        return (own if self.boundary == "pretokens" else pre_tokenizers.WhitespaceSplit()).pre_tokenize_str

    @functools.cached_property
    def _allowed(self) -> dict[tuple[Unit, Unit], bool]:
        return {}

    def allowed(self, first: Unit, second: Unit) -> bool:
        """Whether two tokens may become one."""
        pair = first, second
        if pair not in self._allowed:
            self._allowed[pair] = isinstance(first, str) and isinstance(second, str) and self._is_one(first + second)
        return self._allowed[pair]

    def _is_one(self, signs: str) -> bool:
        within = any(sign in _SPACES for sign in signs[1:])
        if within and (signs == "ĊĊ" or not all(sign in _SPACES for sign in signs)):
            return False
        text = text_of(signs)
        return text is None or self.boundary == "sentence" or len(self._splits(text)) == 1

    def merged(self, rows: Sequence[Sequence[Unit]], most: int) -> list[list[Unit]]:
        """The rows after up to `most` merges."""
        found = [list(row) for row in rows]
        for _ in range(most):
            counts: collections.Counter[tuple[Unit, Unit]] = collections.Counter()
            for row in found:
                counts.update(pair for pair in zip(row, row[1:], strict=False) if self.allowed(*pair))
            if not counts:
                break
            pair = max(counts, key=counts.__getitem__)
            found = [_joined(row, pair) for row in found]
        return found

    def __call__(self, texts: Sequence[Sequence[int]], most: int, vocab: int) -> Merged:
        """Merges tokens of a batch.

        Args:
          texts: ids.
          most: how many pairs are merged.
          vocab: V.
        """
        rows = self.merged([self.units(text) for text in texts], most)
        model, known = self.tokenizer.backend_tokenizer.model, self._known
        numbers: dict[str, int] = {}
        merged = [unit for row in rows for unit in row if isinstance(unit, str) and unit not in known]
        for unit in merged:
            numbers.setdefault(unit, vocab + len(numbers))
        parts = tuple(tuple(token.id for token in model.tokenize(unit)) for unit in numbers)
        ids = known | numbers
        return Merged(tuple(tuple(unit if isinstance(unit, int) else ids[unit] for unit in row) for row in rows), parts)

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        """The tokens that may be parts of merged ones."""
        vocabulary, added, signs = self.tokenizer.get_vocab(), self.tokenizer.added_tokens_decoder, byte_level().keys()
        return {name: token for name, token in vocabulary.items() if token not in added and signs >= set(name)}

    def units(self, ids: Sequence[int]) -> list[Unit]:
        """Tokens by their signs, and special ones by their ids."""
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        return [name if self._known.get(name) == token else token for token, name in zip(ids, names, strict=True)]

    def edges(self, vocab: int) -> tuple[np.ndarray, np.ndarray]:
        """For training: which tokens never follow a letter, or precede one, within a merged token. `[V]` bool, each.

        Args:
          vocab: V; the model's, which may have rows without a token.
        """
        size = min(vocab, len(self.tokenizer))
        begins, ends = np.ones(vocab, bool), np.ones(vocab, bool)
        for token, unit in enumerate(self.units(range(size))):
            begins[token], ends[token] = not self.allowed("x", unit), not self.allowed(unit, "x")
        return begins, ends


def _joined(row: list[Unit], pair: tuple[Any, Any]) -> list[Unit]:
    found: list[Unit] = []
    for unit in row:
        # a merged pair is no first of a next one: its signs are longer than `pair[0]`
        if found and found[-1] == pair[0] and unit == pair[1]:
            found[-1] = pair[0] + pair[1]
        else:
            found.append(unit)
    return found


def text_of(signs: str) -> str | None:
    """The text that signs of a byte-level vocabulary stand for; None if they are no whole characters."""
    try:
        return bytes(byte_level()[sign] for sign in signs).decode()
    except UnicodeDecodeError:
        return None
