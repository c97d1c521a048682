"""A prompt as a turn of a chat, a text as its tokens come, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

from specjax.models.text import HALF, decoder_of, text_before
from specjax.serve.request import Request

_LONGEST = 3  # tokens that may be read and leave a character open: it has 4 bytes at most
_SHORTEST = 8  # tokens of a prompt that are read with what follows it, where they are enough


def user_turn(prompt: Any, chat: Any) -> Any:
    """A prompt, as chat messages where it is a text and `chat` is set.

    >>> user_turn("Sort it.", chat=True)
    [{'role': 'user', 'content': 'Sort it.'}]
    """
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


class Written:
    """The text of tokens that come a few at a time, as `specjax.models.text.new_text` has it of all of them.

    Every token is decoded a few times, with the tokens just before it, however long the text is.

    Args:
      tokenizer: a transformers tokenizer.
      request: what the text is written for.
      special: whether special tokens are written, under their own names.

    Attributes:
      rest: the end of the text that later tokens may still change: a character that is not whole.
    """

    def __init__(self, tokenizer: Any, request: Request, special: bool = False):
        self._decode, self._special = decoder_of(tokenizer, special), special
        self._plain = decoder_of(tokenizer, special=True)
        self._ids = self._end_of(list(request.ids))
        text = self._decode(self._ids)
        self._base = text_before(text, request.is_text)  # the text of `_ids` before the new text
        self._given = 0  # characters after it that have been handed out
        self._at = len(self._ids)  # where the next window begins
        while self._at and self._base != text and self._decode(self._ids[: self._at]).endswith(HALF):
            self._at -= 1
        self.rest = ""

    def _end_of(self, prompt: list[int]) -> list[int]:
        """As much of a prompt as its end is read alike with."""
        text, size = self._decode(prompt), _SHORTEST
        while size < len(prompt):
            own = self._decode(prompt[-size:])
            if own.strip(HALF) and text.endswith(own):
                return prompt[-size:]
            size *= 2
        return prompt

    def add(self, tokens: Sequence[int]) -> str:
        """Reads more tokens; returns the text that has come, of whole characters."""
        self._ids += tokens
        text = self._decode(self._ids)
        if not text.startswith(self._base):  # a tokenizer that writes a text otherwise once more follows
            self._ids, self._base, self._at = self._ids[self._at :], "", 0
            text = self._decode(self._ids)
        new = text[len(self._base) :]
        settled = done = len(new.rstrip(HALF))
        if not new or done < len(new):  # what writes nothing is left out, so that a window ends
            self._ids[self._at :] = [i for i in self._ids[self._at :] if self._writes(i)]
        end = len(self._ids)
        if done < len(new):
            end -= _LONGEST
            early = self._decode(self._ids[: max(end, 0)])
            settled = len(early) - len(self._base) if text.startswith(early) else 0
            done = max(done, settled)
        piece, self.rest, self._given = new[self._given : done], new[done:], max(self._given, done)
        if settled > 0 and end > self._at:
            self._ids, self._at, self._given = self._ids[self._at :], end - self._at, self._given - settled
            self._base = self._decode(self._ids[: self._at])
        return piece

    def _writes(self, token: int) -> bool:
        """Whether it is no special token that is left out."""
        return self._special or bool(self._decode([token])) or not self._plain([token])


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, or None."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return min(found, default=None)


class Stops:
    """Looks for stop strings in a text that comes a few tokens at a time, special tokens under their own names.

    Args:
      tokenizer: a transformers tokenizer.
      request: see `Written`.
      stop: the stop strings, at least one.

    Attributes:
      length: characters so far, without one that is not whole.
    """

    def __init__(self, tokenizer: Any, request: Request, stop: Sequence[str]):
        self._written = Written(tokenizer, request, special=True)
        self._stop, self._kept = stop, max(map(len, stop)) - 1
        self._end = ""
        self.length = 0

    def add(self, tokens: Sequence[int]) -> int | None:
        """Reads more tokens; returns where the first stop string begins that is complete, or None."""
        piece = self._written.add(tokens)
        text = self._end + piece
        self.length += len(piece)
        at = find_stop(text, self._stop)
        self._end = text[max(0, len(text) - self._kept) :]
        return None if at is None else self.length - len(text) + at


def cut_at_stop(tokenizer: Any, request: Request, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, int] | None:
    """The new text up to a stop string, and how many tokens wrote that string; None where there is no stop string.

    The one definition, of a text as it comes and of a record's: tokens are read one by one, and the first of them that
    completes a stop string ends the text, where the earliest string that is then complete begins. So a longer stop string that
    only a later token would complete does not matter, though it may begin before. Special tokens count, under their own names,
    as in transformers' `StopStringCriteria`; the text is without them.

    Args:
      tokenizer: a transformers tokenizer.
      request: see `Written`.
      tokens: the text's ids.
      stop: the stop strings, at least one.
    """
    stops, written = Stops(tokenizer, request, stop), Written(tokenizer, request)
    text, ends = [], [(0, 0)]  # after every token: characters with special tokens, and without
    for count, token in enumerate(tokens, start=1):
        at = stops.add([token])
        text.append(written.add([token]))
        ends.append((stops.length, ends[-1][1] + len(text[-1])))
        if at is not None:
            first = next(i for i, (end, _) in enumerate(ends) if end > at)  # of the tokens that wrote it
            kept = max(ends[first][1] - (ends[first][0] - at), ends[first - 1][1])
            return "".join(text)[:kept], count
    return None
