"""From an automaton over bytes to a table over tokens: every token is walked from every state, along the tree of all tokens."""

import dataclasses
import functools

import numpy as np

from specjax.constrain.regular import Automaton
from specjax.constrain.table import NONE, Table, shown
from specjax.constrain.vocabulary import Vocabulary, first_of

MOST_ENTRIES = 1 << 22
"""Entries of a table, states times classes: 16 MiB for a row, and up to four times that once both are rounded up."""
LONGEST = 32
"""Bytes of a guessed token."""
STATES = 32
"""States that are walked together."""


@dataclasses.dataclass(frozen=True)
class Level:
    """The nodes of one depth in the tree of all tokens.

    Attributes:
      parent: `[n]`, the node above.
      byte: `[n]`.
      tokens: the tokens that end at this depth.
      node: the node of each.
    """

    parent: np.ndarray
    byte: np.ndarray
    tokens: np.ndarray
    node: np.ndarray


@functools.lru_cache(maxsize=8)
def levels(tokens: tuple[bytes | None, ...]) -> list[Level]:
    """The tree of all tokens, from the first byte on."""
    order = sorted((own, token) for token, own in enumerate(tokens) if own)
    ids = np.asarray([token for _, token in order], np.int64)
    lengths = np.asarray([len(own) for own, _ in order], np.int64)
    text = np.frombuffer(b"".join(own for own, _ in order), np.uint8)
    starts = np.cumsum(lengths) - lengths
    found, nodes, depth = [], np.zeros(len(ids), np.int64), 0
    while ids.size:
        key = nodes * 256 + text[starts + depth]
        distinct, nodes = np.unique(key, return_inverse=True)
        ends = lengths == depth + 1
        found.append(Level(distinct // 256, (distinct % 256).astype(np.int64), ids[ends], nodes[ends]))
        ids, lengths, starts, nodes = ids[~ends], lengths[~ends], starts[~ends], nodes[~ends]
        depth += 1
    return found


def classes_of(own: Automaton, vocabulary: Vocabulary) -> np.ndarray:
    """`[V]` int64: tokens of one class lead from every state to the same one. Class 0 leads nowhere.

    What tokens do is compared by sums with random 64-bit weights.
    """
    count = len(own.accepts)
    steps = np.append(np.where(own.following == NONE, count, own.following), np.full((1, 256), count), axis=0)
    steps = steps.astype(np.int32).ravel()
    weights = np.random.default_rng(0).integers(1, 2**63, (2, count), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sums = np.zeros((vocabulary.size, 2), np.uint64)
    for begin in range(0, count, STATES):
        states = np.arange(begin, min(begin + STATES, count))[:, None]
        node_of = np.zeros(1, np.int64)  # of the nodes above, the place among those that are kept; -1: all dead
        for level in levels(vocabulary.tokens):
            above = node_of[level.parent]
            alive = np.flatnonzero(above >= 0)
            states = steps[states[:, above[alive]] * 256 + level.byte[alive]]
            goes = (states != count).any(axis=0)
            states = states[:, goes]
            node_of = np.full(len(level.parent), NONE, np.int64)
            node_of[alive[goes]] = np.arange(states.shape[1])
            if not states.size:
                break
            at = node_of[level.node]
            led = np.where(states == count, 0, states + 1).astype(np.uint64)
            both = np.stack(
                [(one[:, None] * led).sum(axis=0) for one in weights[:, begin : begin + len(states)]], axis=1
            )
            sums[level.tokens[at >= 0]] += both[at[at >= 0]]
    distinct, classes = np.unique(sums, axis=0, return_inverse=True)
    classes = classes.reshape(-1)
    return classes if not distinct[0].any() else classes + 1  # the sum 0 sorts first


def table_of(own: Automaton, vocabulary: Vocabulary, line: str) -> Table:
    """The table of a language over a tokenizer's tokens.

    Raises:
      ValueError: if no sequence of tokens writes a text of it, or if the table is too large.
    """
    classes = classes_of(own, vocabulary)
    count = int(classes.max()) + 1
    if len(own.accepts) * count > MOST_ENTRIES:
        raise ValueError(
            f"{shown(line)}: its table has {len(own.accepts)} states and {count} classes of tokens, more than "
            f"{MOST_ENTRIES} entries: count less, nest less, or list fewer choices"
        )
    following = np.full((len(own.accepts), count), NONE, np.int64)
    tokens = vocabulary.tokens
    for kind, token in zip(*np.unique(classes, return_index=True), strict=True):
        if kind:
            following[:, kind] = _walked(own.following, tokens[token] or b"")
    return Table.of(line, following, classes, own.accepts, vocabulary.eos, guesses(own, vocabulary))


def guesses(own: Automaton, vocabulary: Vocabulary) -> np.ndarray:
    """`[S]` int32: for a state that only one text may follow, the longest token that begins it; -1 for other states."""
    steps = own.following != NONE
    forced = (steps.sum(axis=1) == 1) & ~own.accepts
    byte = np.argmax(steps, axis=1)
    after = own.following[np.arange(len(byte)), byte]
    by_text = first_of(vocabulary.tokens)
    found = np.full(len(forced), NONE, np.int32)
    for start in np.flatnonzero(forced):
        state, text = start, b""
        while forced[state] and len(text) < LONGEST:
            text, state = text + bytes([byte[state]]), after[state]
            found[start] = by_text.get(text, found[start])
    return found


def _walked(following: np.ndarray, text: bytes) -> np.ndarray:
    """`[S]`: where a text leads from each state."""
    states = np.arange(len(following))
    for byte in text:
        states = np.where(states == NONE, NONE, following[states, byte])
    return states
