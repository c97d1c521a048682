"""Context-free grammars: a matcher on the host, the package llguidance, says which tokens may follow.

A program asks it once for all nodes of all rows. What it answers follows from the tokens alone, so nothing has to be undone
when a draft is rejected.
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.constrain.table import shown
from specjax.constrain.vocabulary import Vocabulary

SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How a JSON value is written under a schema: a model could go on with spaces for ever."""
MOST_LANES = 1024
"""Matchers that are kept between calls, each where a row's text has come to; twice the rows of a call, if that is more."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A language that a matcher on the host follows.

    Attributes:
      line: how the user named it.
      vocabulary: of the model.
      handle: its number in this process.
    """

    line: str
    vocabulary: Vocabulary
    handle: int

    def __len__(self) -> int:
        return 1

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, without an end of text, write a whole text of the language."""
        matcher = _guidance().LLMatcher(*_OPEN[self.handle], log_level=0)
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    def first_mask(self) -> np.ndarray:
        """`[W]` int32: the tokens with which a text may begin, see `masks`."""
        at, none = np.asarray([0]), np.zeros((1, 1, 0), np.int32)
        words = -(-self.vocabulary.size // 32)
        return masks(np.asarray([self.handle]), np.zeros((1, 1), np.int32), at, at, none, words)[0, 0]


@dataclasses.dataclass
class _Lane:
    """A row's matcher and the tokens that it has read."""

    matcher: Any
    read: list[int]


_OPEN: list[tuple[Any, str]] = []
_LANES: dict[tuple[int, int], _Lane] = {}
_LOCK = threading.Lock()


def opened(line: str, text: str, vocabulary: Vocabulary) -> Grammar:
    """A grammar in llguidance's kind of Lark, or a JSON Schema, made ready for `masks`.

    Raises:
      ValueError: if it is no grammar.
    """
    own = read_by_guidance(line, text, vocabulary)
    with _LOCK:
        _OPEN.append(own)
        return Grammar(line, vocabulary, len(_OPEN) - 1)


def read_by_guidance(line: str, text: str, vocabulary: Vocabulary) -> tuple[Any, str]:
    """The tokenizer and the grammar as llguidance reads them.

    Raises:
      ValueError: if it is no grammar.
    """
    guidance, tokenizer = _guidance(), _tokenizer(vocabulary)
    if text.lstrip()[:1] == "{":
        grammar = _of_schema(guidance, line, text)
    else:
        grammar = guidance.LLMatcher.grammar_from_lark(text)
    matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{shown(line)}: the grammar cannot be read: {_first(matcher.get_error())}")
    return tokenizer, grammar


def _of_schema(guidance: Any, line: str, text: str) -> str:
    try:
        return guidance.LLMatcher.grammar_from_json_schema(text, overrides=SPACES)
    except ValueError as error:
        raise ValueError(f"{shown(line)}: the schema is not JSON: {_first(str(error))}") from error


def masks(
    handles: np.ndarray, tokens: np.ndarray, begin: np.ndarray, length: np.ndarray, paths: np.ndarray, words: int
) -> np.ndarray:
    """The tokens that may follow at every node, `[B, T, words]` int32: bit v % 32 of word v // 32 is token v.

    All bits are set for rows without a grammar, and at nodes whose path leads out of it. None is set at all nodes of a row
    whose text the matcher cannot read.

    Args:
      handles: `[B]`, `Grammar.handle`, -1 for none.
      tokens: `[B, L]`, the rows' texts.
      begin: `[B]`, where their new tokens begin.
      length: `[B]`, where they end.
      paths: `[B, T, D]`, the tokens below the text for each node, -1 for none.
      words: of a mask.
    """
    from llguidance.numpy import fill_next_token_bitmask

    out = np.full((*paths.shape[:2], words), -1, np.int32)
    with _LOCK:
        _make_room(len(handles))
        for row in np.flatnonzero(np.asarray(handles) >= 0):
            matcher = _at(int(row), int(handles[row]), tokens[row, begin[row] : length[row]].tolist())
            if matcher is None:
                out[row] = 0
                continue
            for node, path in enumerate(paths[row]):
                below = path[path >= 0].tolist()
                count = matcher.try_consume_tokens(below)
                if count == len(below) and not matcher.is_error():
                    fill_next_token_bitmask(matcher, out[row], node)
                matcher.rollback(count)
    return out


def tried(
    handles: np.ndarray,
    tokens: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
    orders: np.ndarray,
    again: np.ndarray,
) -> np.ndarray:
    """Which tokens may follow, `[B, 2, M]` bool, asked one by one as `specjax.warpers.Warper.tried` needs them.

    Unlike `masks`, it allows every way to write a text in tokens, also where only one text may follow.

    Args:
      handles: `[B]`, `Grammar.handle`, -1 for none.
      tokens: `[B, L]`, the rows' texts.
      begin: `[B]`, where their new tokens begin.
      length: `[B]`, where they end.
      orders: `[B, 2, M]`.
      again: `[B]`.
    """
    out = np.zeros(orders.shape, bool)
    with _LOCK:
        _make_room(len(handles))
        for row in np.flatnonzero(np.asarray(handles) >= 0):
            matcher = _at(int(row), int(handles[row]), tokens[row, begin[row] : length[row]].tolist())
            if matcher is not None:
                ends = _OPEN[int(handles[row])][0].eos_tokens
                _try(matcher, ends, orders[row], bool(again[row]), out[row])
    return out


def _try(matcher: Any, ends: Sequence[int], orders: np.ndarray, again: bool, out: np.ndarray) -> None:
    """Fills one row `[2, M]` of `tried`."""
    may = lambda token: matcher.is_accepting() if token in ends else matcher.validate_tokens([token]) == 1
    first = orders[0].tolist()
    at = next((at for at, token in enumerate(first) if may(token)), None)
    if at is None:
        return
    out[0, at] = True
    if not again:
        out[0, at + 1 : at + 2] = [may(token) for token in first[at + 1 : at + 2]]
        return
    refused = set(first[:at])
    second = next((i for i, token in enumerate(orders[1].tolist()) if token not in refused and may(token)), None)
    if second is not None:
        out[1, second] = True


def _make_room(rows: int) -> None:
    """Forgets all matchers if there are too many for a call with so many rows."""
    if len(_LANES) > max(MOST_LANES, 2 * rows):
        _LANES.clear()


def _at(row: int, handle: int, text: list[int]) -> Any:
    """A matcher that has read a text; None if the text is not in the language."""
    lane = _LANES.get((row, handle))
    if lane is None or lane.matcher.is_error():
        lane = _LANES[row, handle] = _Lane(_guidance().LLMatcher(*_OPEN[handle], log_level=0), [])
    same = next(
        (at for at, (a, b) in enumerate(zip(lane.read, text, strict=False)) if a != b), min(len(lane.read), len(text))
    )
    lane.matcher.rollback(len(lane.read) - same)
    count = lane.matcher.try_consume_tokens(text[same:])
    lane.read = text[: same + count]
    return lane.matcher if lane.read == text and not lane.matcher.is_error() else None


class _Listed:
    """A vocabulary as llguidance reads one."""

    bos_token_id = None

    def __init__(self, own: Vocabulary):
        self.tokens = [b"" if text is None else text for text in own.tokens]
        self.special_token_ids = [token for token, text in enumerate(own.tokens) if text is None]
        self.eos_token_id, self._encode = own.eos[0], own.tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


@functools.lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    """A vocabulary in llguidance's form, which all grammars for it share."""
    guidance = _guidance()
    return guidance.LLTokenizer(guidance.TokenizerWrapper(_Listed(vocabulary)), eos_token=list(vocabulary.eos))


def token_set(vocabulary: Vocabulary) -> tuple[Any, Any]:
    """The package llguidance, and a vocabulary in its form."""
    return _guidance(), _tokenizer(vocabulary)


def _first(error: str) -> str:
    return " ".join(error.split())[:120]


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("grammars need the package llguidance: pip install 'specjax[constrain]'") from error
    return llguidance
