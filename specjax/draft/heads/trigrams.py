"""Tables for a causal model of three tokens: counted in a datastore, or read from an ARPA file (KenLM, SRILM).

A word of the file is a token of the target, as its tokenizer's vocabulary spells it. If all words are whole numbers, they
are ids: `lmplz -o 3 < ids.txt > ids.arpa`.
"""

import gzip
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.draft.heads.datastore import load_datastore
from specjax.draft.trigrams import counted, tables_of
from specjax.models.errors import ModelError

_MARKS = ("<s>", "</s>", "<unk>")
_NEVER = -99.0
"""log10 of the probability of a token that the file does not have, if it has no `<unk>` either."""


def load_trigrams(asked: str, target: Any, prior: float, mesh: jax.sharding.Mesh | None = None) -> dict[str, Any]:
    """Tables for a target, see `specjax.draft.trigrams`.

    Args:
      asked: an ARPA file (it may be gzipped), or a datastore: a folder, the name of a shipped one, or a hub id.
      target: from `specjax.models.load`.
      prior: of counts, where they are counted.
      mesh: where to place them, a copy on every device.

    Raises:
      ModelError: (a ValueError) if there is none, it is damaged, or it is for other tokens.
    """
    if Path(asked).is_file():
        vocabulary = {} if target.tokenizer is None else target.tokenizer.get_vocab()
        tables = read_arpa(asked, vocabulary, target.lm.vocab_size)
    else:
        tables = counted(np.asarray(load_datastore(asked, target)["tokens"]), target.lm.vocab_size, prior)
    placed = {name: jnp.asarray(table) for name, table in tables.items()}
    if mesh is None:
        return placed
    return jax.device_put(placed, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def read_arpa(file: str | os.PathLike[str], vocabulary: dict[str, int], vocab_size: int) -> dict[str, np.ndarray]:
    """The tables of an ARPA file. N-grams with `<s>`, `</s>` or `<unk>` are left out, unless these are tokens.

    Args:
      file: of order 3 at most.
      vocabulary: ids by the tokens' spelling.
      vocab_size: V.

    Raises:
      ModelError: if it is no such file, its order is larger, or a word is no token.
    """
    opened = gzip.open if str(file).endswith(".gz") else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            orders = _orders(lines, str(file))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ModelError(f"{file} cannot be read as an ARPA file") from error
    id_of = _ids(file, [words[0] for words, _, _ in orders[0]], vocabulary, vocab_size)
    unknown = next((value for words, value, _ in orders[0] if words[0] == "<unk>"), _NEVER)
    unigram, backoff = np.full(vocab_size, unknown), np.zeros(vocab_size)
    for words, value, back in orders[0]:
        if (token := id_of(words[0])) >= 0:
            unigram[token], backoff[token] = value, back
    two, three = (_sorted(grams, id_of, size) for grams, size in zip(orders[1:], (2, 3), strict=True))
    pairs = {*map(tuple, two[0].tolist())}
    whole = np.asarray([tuple(row) in pairs for row in three[0][:, :2].tolist()], bool)
    nats = np.log(10.0)
    parts = (unigram, backoff, two[0], two[1], two[2], three[0][whole], three[1][whole])
    return tables_of(*(part * nats if part.dtype == float else part for part in parts))


Gram = tuple[list[str], float, float]
"""Words, log10 of the probability, log10 of the back-off."""


def _orders(lines: Iterable[str], file: str) -> list[list[Gram]]:
    """The n-grams of orders 1 to 3."""
    found: list[list[Gram]] = [[], [], []]
    order = None
    for line in lines:
        line = line.strip()
        if line.startswith("\\"):
            name = line.strip("\\:")
            order = int(name.removesuffix("-grams")) if name.endswith("-grams") else None
            if order is not None and not 1 <= order <= 3:
                raise ModelError(f"{file} has {order}-grams: make a file of order 3 (`lmplz -o 3`)")
        elif order is not None and line:
            fields = line.split()
            if len(fields) not in (order + 1, order + 2):
                raise ModelError(f"{file}: {line!r} is not a line of {order}-grams")
            try:
                back = float(fields[order + 1]) if len(fields) == order + 2 else 0.0
                found[order - 1].append((fields[1 : order + 1], float(fields[0]), back))
            except ValueError as error:
                raise ModelError(f"{file}: {line!r} is not a line of {order}-grams") from error
    if not found[0]:
        raise ModelError(f"{file} is not an ARPA file with n-grams of up to three words")
    return found


def _ids(file: Any, words: list[str], vocabulary: dict[str, int], vocab_size: int) -> Callable[[str], int]:
    """From a word to its id; -1 for a mark."""
    plain = [word for word in words if word not in _MARKS]
    numbers = all(word.isdecimal() for word in plain)
    ids = {word: int(word) if numbers else vocabulary.get(word, vocab_size) for word in plain}
    ids |= {mark: vocabulary.get(mark, -1) for mark in _MARKS if not numbers}
    strange = next((word for word, token in ids.items() if token >= vocab_size), None)
    if strange is not None:
        raise ModelError(
            f"{file} has the word {strange!r}, which is no token of the target: make it from texts whose words are the "
            "target's tokens, or their ids"
        )
    return lambda word: ids.get(word, -1)


def _sorted(grams: list[Gram], id_of: Callable[[str], int], size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N-grams `[N, size]` in ascending order, their logarithms and their back-offs `[N]`."""
    known = [(ids, value, back) for words, value, back in grams if min(ids := [id_of(word) for word in words]) >= 0]
    ids = np.asarray([ids for ids, _, _ in known], np.int64).reshape(-1, size)
    order = np.lexsort(ids.T[::-1])
    numbers = np.asarray([(value, back) for _, value, back in known], float).reshape(-1, 2)[order]
    return ids[order], numbers[:, 0], numbers[:, 1]
