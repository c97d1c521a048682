"""A prompt as a chat turn, text from tokens as they come, and the search for stop strings."""

from collections.abc import Sequence
from typing import Any

from specjax.models.text import HALF, decoder_of, text_before
from specjax.serve.request import Request

_LONGEST = 3  # the most tokens that can leave a character incomplete: it has at most 4 bytes
_SHORTEST = 8  # the fewest tokens of a prompt that are decoded with the new text


def user_turn(prompt: Any, chat: Any) -> Any:
    """A prompt, as chat messages if it is a text and `chat` is set.

    >>> user_turn("Sort it.", chat=True)
    [{'role': 'user', 'content': 'Sort it.'}]
    """
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


class Written:
    """The text of tokens that come a few at a time, equal to `specjax.models.text.new_text` of all of them.

    Every token is decoded a few times, together with the tokens just before it, whatever the length of the text.

    Args:
      tokenizer: a transformers tokenizer.
      request: the request that the text answers.
      special: whether special tokens are written, under their own names.

    Attributes:
      rest: the end of the text that later tokens may still change: an incomplete character.
    """

    def __init__(self, tokenizer: Any, request: Request, special: bool = False):
        self._decode, self._special = decoder_of(tokenizer, special), special
        self._plain = decoder_of(tokenizer, special=True)
        self._ids = self._end_of(list(request.ids))
        text = self._decode(self._ids)
        self._base = text_before(text, request.is_text)  # the text of `_ids` before the new text
        self._given = 0  # characters after it that have been returned
        self._at = len(self._ids)  # where the next window begins
        while self._at and self._base != text and self._decode(self._ids[: self._at]).endswith(HALF):
            self._at -= 1
        self.rest = ""

    def _end_of(self, prompt: list[int]) -> list[int]:
        """The shortest end of a prompt with which its last tokens are decoded in the same way."""
        text, size = self._decode(prompt), _SHORTEST
        while size < len(prompt):
            own = self._decode(prompt[-size:])
            if own.strip(HALF) and text.endswith(own):
                return prompt[-size:]
            size *= 2
        return prompt

    def add(self, tokens: Sequence[int]) -> str:
        """Reads more tokens; returns the new text, in whole characters."""
        self._ids += tokens
        text = self._decode(self._ids)
        if not text.startswith(self._base):  # some tokenizers write a text differently once more follows
            self._ids, self._base, self._at = self._ids[self._at :], "", 0
            text = self._decode(self._ids)
        new = text[len(self._base) :]
        settled = done = len(new.rstrip(HALF))
        if not new or done < len(new):  # tokens that write nothing are left out, so that a window ends
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
        """Whether a token is written, which omitted special tokens are not."""
        return self._special or bool(self._decode([token])) or not self._plain([token])


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """The start of the first stop string in the text, or None."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return min(found, default=None)


class Stops:
    """Finds stop strings in a text that comes a few tokens at a time; special tokens count, under their own names.

    Args:
      tokenizer: a transformers tokenizer.
      request: see `Written`.
      stop: the stop strings, at least one.

    Attributes:
      length: the number of complete characters so far.
    """

    def __init__(self, tokenizer: Any, request: Request, stop: Sequence[str]):
        self._written = Written(tokenizer, request, special=True)
        self._stop, self._kept = stop, max(map(len, stop)) - 1
        self._end = ""
        self.length = 0

    def add(self, tokens: Sequence[int]) -> int | None:
        """Reads more tokens; returns the start of the first complete stop string, or None."""
        piece = self._written.add(tokens)
        text = self._end + piece
        self.length += len(piece)
        at = find_stop(text, self._stop)
        self._end = text[max(0, len(text) - self._kept) :]
        return None if at is None else self.length - len(text) + at


def cut_at_stop(tokenizer: Any, request: Request, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, int] | None:
    """The new text up to a stop string, and how many tokens wrote that string; None if there is no stop string.

    This definition holds for streamed text and for records. Tokens are read one by one. The first token that completes
    a stop string ends the text, at the start of the earliest string that is then complete. So a stop string that only a
    later token would complete does not matter, even if it begins earlier.

    Special tokens count, under their own names, as in transformers' `StopStringCriteria`. The text does not include
    them.

    Args:
      tokenizer: a transformers tokenizer.
      request: see `Written`.
      tokens: the text's ids.
      stop: the stop strings, at least one.
    """
    stops, written = Stops(tokenizer, request, stop), Written(tokenizer, request)
    text, ends = [], [(0, 0)]  # after every token: the number of characters with special tokens, and without
    for count, token in enumerate(tokens, start=1):
        at = stops.add([token])
        text.append(written.add([token]))
        ends.append((stops.length, ends[-1][1] + len(text[-1])))
        if at is not None:
            first = next(i for i, (end, _) in enumerate(ends) if end > at)  # of the tokens that wrote it
            kept = max(ends[first][1] - (ends[first][0] - at), ends[first - 1][1])
            return "".join(text)[:kept], count
    return None
