"""A hidden Markov model of a model's texts, kept in a folder: what Deco-G (arXiv:2510.03595) knows of how a text goes on.

In shapes `H` denotes hidden states, `V` the vocabulary.
"""

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from specjax.constrain.vocabulary import Vocabulary

ABOUT, ARRAYS = "hmm.json", "hmm.safetensors"
_NAMES = ("initial", "transition", "emission")


@dataclasses.dataclass(frozen=True)
class Hmm:
    """A hidden Markov model of new texts, from their first token to their end-of-text token. Distributions sum to 1.

    Attributes:
      name: how the user named it, for errors.
      digest: of the arrays; models are equal if these two are.
      initial: `[H]` float32, of the state that writes the first token.
      transition: `[H, H]` float32, from each state to the one that writes the next token.
      emission: `[H, V]` float32, of each state's token.
      words: a digest of the vocabulary's tokens; empty if it is not known.
    """

    name: str = dataclasses.field(compare=False)
    digest: str
    initial: np.ndarray = dataclasses.field(compare=False, repr=False)
    transition: np.ndarray = dataclasses.field(compare=False, repr=False)
    emission: np.ndarray = dataclasses.field(compare=False, repr=False)
    words: str = ""

    @classmethod
    def of(cls, name: str, initial: Any, transition: Any, emission: Any, words: str = "") -> Self:
        """A model from its distributions.

        Raises:
          ValueError: if shapes do not fit, or rows are no distributions.
        """
        arrays = [np.ascontiguousarray(own, np.float32) for own in (initial, transition, emission)]
        count = len(arrays[0]) if arrays[0].ndim == 1 else 0
        if not count or arrays[1].shape != (count, count) or arrays[2].ndim != 2 or len(arrays[2]) != count:
            raise ValueError(f"{name} is no hidden Markov model: its arrays must be [H], [H, H] and [H, V]")
        if not all((own >= 0).all() and np.allclose(own.sum(axis=-1), 1, atol=1e-3) for own in arrays):
            raise ValueError(f"{name} is no hidden Markov model: each row of its arrays must be a distribution")
        digest = hashlib.sha256(b"".join(own.tobytes() for own in arrays)).hexdigest()[:16]
        return cls(name, digest, arrays[0], arrays[1], arrays[2], words)

    def __len__(self) -> int:
        return len(self.initial)

    def save(self, folder: str | os.PathLike[str], **about: Any) -> None:
        """Writes it; an older one in the folder is replaced.

        Args:
          folder: created if needed.
          **about: what else its `hmm.json` tells.
        """
        from safetensors.numpy import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)  # without it, the folder holds no model
        save_file({name: getattr(self, name) for name in _NAMES}, folder / ARRAYS)
        states, vocabulary = self.emission.shape
        said = {"states": states, "vocabulary": vocabulary, "words": self.words, "digest": self.digest, **about}
        (folder / ABOUT).write_text(json.dumps(said, indent=2) + "\n")

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Hmm":
        """The model in a folder.

        Raises:
          ValueError: if there is none.
        """
        try:
            return _loaded(str(folder), (Path(folder) / ABOUT).stat().st_mtime_ns)
        except OSError as error:
            raise ValueError(
                f"there is no hidden Markov model in {str(folder)!r} ({ABOUT}): `specjax train hmm` makes one"
            ) from error

    def check(self, vocabulary: Vocabulary) -> None:
        """Raises ValueError if it is of another vocabulary."""
        size = self.emission.shape[1]
        if size != vocabulary.size or self.words not in ("", words_of(vocabulary)):
            raise ValueError(
                f"the hidden Markov model {self.name} is of another vocabulary than {vocabulary.name} ({size} tokens, and "
                f"{vocabulary.size}): make one for it (`specjax train hmm --target`)"
            )


def words_of(vocabulary: Vocabulary) -> str:
    """A digest of a vocabulary's tokens.

    Raises:
      ValueError: see `Vocabulary.tokens`.
    """
    return _digest(vocabulary.tokens)


@functools.lru_cache(maxsize=8)
def _digest(tokens: tuple[bytes | None, ...]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def _loaded(folder: str, changed: int) -> Hmm:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        said = json.loads((Path(folder) / ABOUT).read_text())
        found = load_file(Path(folder) / ARRAYS)
        own = Hmm.of(folder, *(found[name] for name in _NAMES), words=said["words"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"the hidden Markov model in {folder!r} is damaged ({error}): make it again") from error
    if own.digest != said.get("digest"):
        raise ValueError(f"the hidden Markov model in {folder!r} is damaged (its arrays are others): make it again")
    return own
