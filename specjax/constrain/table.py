"""The table of a constraint: a finite automaton over tokens, with tokens that act alike merged into classes.

The idea of walking an automaton token by token is that of outlines (Willard and Louf 2023, arXiv:2307.09702). In shapes `S`
denotes states, `C` classes of tokens, `V` the vocabulary.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np

NONE = -1
"""In place of a state: no text of the language goes on that way."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A language of token sequences that end with an end of text. The first state is 0.

    Attributes:
      line: how the user named it.
      digest: of the arrays; tables are equal if these two are.
      following: `[S, C]` int32, the next state; -1 if no text of the language goes on that way.
      classes: `[V]` int32, the class of every token.
      distance: `[S]` int32, the fewest tokens from each state to the end of a text, without the end-of-text token.
      guess: `[S]` int32, a token for each state that only one text may follow; -1 for others. It is worth a draft.
    """

    line: str
    digest: str
    following: np.ndarray = dataclasses.field(compare=False, repr=False)
    classes: np.ndarray = dataclasses.field(compare=False, repr=False)
    distance: np.ndarray = dataclasses.field(compare=False, repr=False)
    guess: np.ndarray = dataclasses.field(compare=False, repr=False)

    @classmethod
    def of(
        cls,
        line: str,
        following: np.ndarray,
        classes: np.ndarray,
        accepts: np.ndarray,
        eos: Sequence[int],
        guess: np.ndarray | None = None,
    ) -> Self:
        """The table of a token automaton: without dead ends, and with ends of text.

        Args:
          line: how the user named it.
          following: `[S, C]` int32, -1 for none; state 0 is the first.
          classes: `[V]` int32; the class of tokens in `eos` is not looked at.
          accepts: `[S]` bool, states in which a text may end.
          eos: ids that end a text.
          guess: `[S]` int32, a token that is likely in each state, or -1; None for none. Where only an end of text is
            allowed, that is the guess.

        Raises:
          ValueError: if no sequence of tokens leads to the end of a text.
        """
        distance = distances(following, accepts)
        if distance[0] == NONE:
            raise ValueError(f"{shown(line)}: no sequence of this tokenizer's tokens writes a text that it allows")
        kept = _reached(np.where(_taken(following, distance) == NONE, NONE, following)) & (distance != NONE)
        number = np.append(np.cumsum(kept) - 1, NONE)
        ended = int(kept.sum())
        rows = np.where(kept[following] & (following != NONE), number[following], NONE)[kept]
        ends = np.append(np.where(accepts[kept], ended, NONE), ended)
        rows = np.concatenate([np.append(rows, np.full((1, rows.shape[1]), NONE), axis=0), ends[:, None]], axis=1)
        rows, merged = np.unique(rows, axis=1, return_inverse=True)
        merged = merged.reshape(-1)  # its shape differs between versions of numpy
        own = merged[classes]
        own[list(eos)] = merged[-1]
        used, own = np.unique(own, return_inverse=True)
        rows, own = rows[:, used], own.reshape(-1)
        tokens = np.append(np.full(len(kept), NONE) if guess is None else guess, NONE)[np.append(kept, True)]
        allowed = (tokens != NONE) & (rows[np.arange(len(rows)), own[np.maximum(tokens, 0)]] != NONE)
        only = (rows == ended).sum(axis=1) == (rows != NONE).sum(axis=1)
        guesses = np.where(allowed, tokens, np.where(only & (len(eos) > 0), eos[0] if eos else NONE, NONE))
        guesses[-1] = NONE  # a text that has ended drafts nothing
        given = (rows, own, np.append(distance[kept], 0), guesses)
        arrays = [np.ascontiguousarray(each, np.int32) for each in given]
        digest = hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()[:16]
        return cls(line, digest, *arrays)

    def __len__(self) -> int:
        return len(self.distance)

    def allowed(self, state: int, room: int | None = None) -> np.ndarray:
        """`[V]` bool: the tokens after a state; with `room`, those after which a text can end within so many tokens, this
        one included.
        """
        after = self.following[state]
        far = np.where(after == NONE, np.iinfo(np.int32).max, self.distance[after])
        return (far <= (np.iinfo(np.int32).max - 1 if room is None else room - 1))[self.classes]

    def next(self, state: int, token: int) -> int:
        """The state after a token; -1 if it is not allowed."""
        return int(self.following[state, self.classes[token]])

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, without an end of text, write a whole text of the language."""
        state = 0
        for token in tokens:
            state = self.next(state, token)
            if state == NONE:
                return False
        return bool(self.distance[state] == 0)

    def forced(self, tokens: Sequence[int]) -> int:
        """How many of a text's tokens stand where only one text may follow; ends of texts count."""
        state, count = 0, 0
        for token in tokens:
            count += int(self.guess[state] != NONE)
            state = self.next(state, token)
        return count


def shown(line: str) -> str:
    """A constraint's line for errors, cut if it is long; a grammar may have several lines."""
    line = line.strip().replace("\n", " ")
    return f"constraint {line if len(line) <= 60 else line[:57] + '...'}"


def _taken(following: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """`[S, C]`: the distance after each step; -1 if there is none."""
    return np.where(following == NONE, NONE, distance[following])


def distances(following: np.ndarray, accepts: np.ndarray) -> np.ndarray:
    """`[S]` int32: the fewest steps from each state to one that accepts; -1 if there are none."""
    count = len(accepts)
    begin, kind = np.nonzero(following != NONE)
    edges = np.unique(following[begin, kind].astype(np.int64) * count + begin)  # by their ends
    ends = np.searchsorted(edges // count, np.arange(count + 1))
    begins = edges % count
    found = np.where(accepts, 0, NONE).astype(np.int32)
    new, step = np.flatnonzero(accepts), 0
    while new.size:
        step += 1
        near = np.concatenate([begins[ends[state] : ends[state + 1]] for state in new])
        new = np.unique(near[found[near] == NONE])
        found[new] = step
    return found


def _reached(following: np.ndarray) -> np.ndarray:
    """`[S]` bool: the states that lie on a way from state 0."""
    found = np.zeros(len(following), bool)
    new = np.asarray([0])
    while new.size:
        found[new] = True
        after = np.unique(following[new])
        new = after[(after != NONE) & ~found[after]]
    return found
