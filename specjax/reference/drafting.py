"""Oracles for the drafters that need no model."""

from collections.abc import Sequence

import numpy as np


def prompt_lookup(text: Sequence[int], length: int, ngram: int, min_ngram: int, factor: float) -> list[int]:
    """Oracle: tokens copied from after the most recent, longest earlier match of the text's end; [] if none.

    At most `length`, and at most `factor` for each token of the match. A copy that reaches the end of the text
    continues with the copied tokens.
    """
    text = list(text)
    for size in range(min(ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                grown = list(text)
                for i in range(min(length, int(factor * size))):
                    grown.append(grown[end + i])
                return grown[len(text) :]
    return []


def token_recycling_update(table: np.ndarray, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """Oracle: the table after each slot in order overwrote its token's row (-1: none) with its top-k logits."""
    table = np.array(table)
    for token, row in zip(tokens, logits, strict=True):
        if token >= 0:
            table[token] = np.argsort(-np.asarray(row), kind="stable")[: table.shape[1]]
    return table


def token_recycling_tree(
    table: np.ndarray, root: int, parents: Sequence[int], ranks: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """Oracle: every node's token, looked up under its parent's (-1 from the first empty entry on), and which nodes are
    valid.
    """
    tokens = [int(root)]
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        tokens.append(int(table[tokens[parent], rank]) if tokens[parent] >= 0 else -1)
    return tokens, [token >= 0 for token in tokens]


class NgramTable:
    """Oracle: a table from the hash of n tokens to the token that followed last."""

    def __init__(self, ngram: int, slots: int):
        self.ngram, self.slots, self.entries = ngram, slots, {}

    def index(self, tokens: Sequence[int]) -> int:
        """The slot of n tokens."""
        found = 0
        for token in tokens:
            found = (found * 6364136223846793005 + int(token)) % 2**64
        return found % self.slots

    def add(self, text: Sequence[int], begin: int = 0) -> None:
        """Every n-gram of a text from `begin` on that a token follows."""
        for i in range(begin, len(text) - self.ngram):
            self.entries[self.index(text[i : i + self.ngram])] = int(text[i + self.ngram])

    def draft(self, text: Sequence[int], length: int, min_length: int) -> list[int]:
        """What the table makes of the end of a text."""
        grown = list(text)
        while len(text) >= self.ngram and len(grown) < len(text) + length:
            found = self.entries.get(self.index(grown[-self.ngram :]))
            if found is None:
                break
            grown.append(found)
        return grown[len(text) :] if len(grown) - len(text) >= min_length else []


def place_after(given: Sequence[int], text: Sequence[int], ngram: int) -> int | None:
    """Oracle: the place in `given` after the only occurrence of the fewest last tokens of a text that have one; None if
    none of up to `ngram` have.
    """
    for size in range(1, min(ngram, len(text)) + 1):
        ends = [end for end in range(size, len(given) + 1) if list(given[end - size : end]) == list(text[-size:])]
        if len(ends) < 2:
            return ends[0] if ends else None
    return None


def input_pointer(given: Sequence[int], output: Sequence[int], ngram: int, begins: bool) -> int | None:
    """Oracle: the place in its input that an output continues, taken along token by token; None for none.

    `begins` says whether an empty output continues the beginning of the input.
    """
    place = 0 if begins else None
    for count, token in enumerate(output, 1):
        if place is not None and list(given[place : place + 1]) == [token]:
            place += 1
        else:
            place = place_after(given, output[:count], ngram)
    return place
