"""What two vocabularies have in common: arrays made once, on the host, from the bytes that tokens write.

Shapes: `V` tokens of the target, `U` tokens that both models have, `W` tokens of the draft model that spell one of the
target's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.constrain.vocabulary import Vocabulary

LONGEST = 16
"""W, at most: of a longer spelling the last tokens are kept."""


@dataclasses.dataclass(frozen=True)
class Words:
    """A vocabulary.

    Attributes:
      texts: the bytes that each token writes; None for special tokens, and for rows without a token.
      names: the special tokens by their names.
      end: the token that ends a text.
    """

    texts: Sequence[bytes | None]
    names: Mapping[str, int] = dataclasses.field(default_factory=dict)
    end: int = 0

    @classmethod
    def of(cls, model: Any) -> "Words":
        """The vocabulary of a loaded model.

        Raises:
          ValueError: if its tokenizer does not join the texts of tokens one after the other.
        """
        texts = Vocabulary(model.tokenizer, model.lm.vocab_size, ()).tokens
        known = model.tokenizer.get_vocab().items()
        names = {name: token for name, token in known if token < len(texts) and texts[token] is None}
        return cls(texts, names, next(iter(model.eos_ids), 0))

    @property
    def by_text(self) -> dict[bytes, int]:
        """The token that a tokenizer writes for each text: the last of several, as byte tokens precede others."""
        return {text: token for token, text in enumerate(self.texts) if text}


@dataclasses.dataclass(frozen=True)
class Tables:
    """From the target's tokens to the draft model's, and back.

    Attributes:
      ids: `[U]` int32, the target's tokens that both have, increasing.
      columns: `[U]` int32, the draft model's token for each.
      spelling: `[V, W]` int32, the draft model's tokens that write each token of the target; 0 after the last.
      counts: `[V]` int32, how many they are, at least 1.
    """

    ids: np.ndarray
    columns: np.ndarray
    spelling: np.ndarray
    counts: np.ndarray

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The tables as parameters, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def stretch(self) -> int:
        """How many tokens of the draft model a text has for one of the target's, at most, if its words are not unusual."""
        return math.ceil(self.counts.mean())


def tables(target: Words, draft: Words) -> Tables:
    """The tables of a target and a draft model.

    Texts of tokens are compared as bytes, and special tokens by name. A token of the target that the draft model lacks
    is spelt by the longest tokens that fit, and one without a text, such as an unknown special token, by the draft
    model's end of a text.

    Raises:
      ValueError: if they have no token in common.
    """
    ours, theirs = target.by_text, draft.by_text
    pairs = {ours[text]: theirs[text] for text in ours.keys() & theirs.keys()}
    pairs |= {target.names[name]: draft.names[name] for name in target.names.keys() & draft.names.keys()}
    if not pairs:
        raise ValueError("the two vocabularies have no token in common")
    ids = np.asarray(sorted(pairs), np.int32)
    longest = max(map(len, theirs), default=0)
    spelt = [
        [pairs[token]] if token in pairs else _spelt(text or b"", theirs, longest) or [draft.end]
        for token, text in enumerate(target.texts)
    ]
    counts = np.minimum([len(own) for own in spelt], LONGEST).astype(np.int32)
    spelling = np.zeros((len(spelt), counts.max()), np.int32)
    for row, own in zip(spelling, spelt, strict=True):
        last = own[-LONGEST:]
        row[: len(last)] = last
    return Tables(ids, np.asarray([pairs[token] for token in ids.tolist()], np.int32), spelling, counts)


def _spelt(text: bytes, known: Mapping[bytes, int], longest: int) -> list[int]:
    """The longest known tokens that write a text, one after the other; bytes that none writes are left out."""
    found, at = [], 0
    while at < len(text):
        sizes = range(min(longest, len(text) - at), 0, -1)
        size = next((size for size in sizes if text[at : at + size] in known), 0)
        if size:
            found.append(known[text[at : at + size]])
        at += size or 1
    return found
