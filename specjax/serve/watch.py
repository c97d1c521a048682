"""The texts of running rows: passed on as they come, and ended at a complete stop string."""

from collections.abc import Callable, Sequence
from typing import Any

from specjax.models.text import new_text
from specjax.serve.request import Request
from specjax.serve.text import Stops, Written, cut_at_stop
from specjax.state import Finish

OnText = Callable[[int, str], None]
End = tuple[str | None, int | None]
"""A finished text, and how many tokens wrote its stop string; None if it has none."""


class Watch:
    """Finds stop strings in running rows, and passes on text as it comes."""

    def __init__(self, tokenizer: Any, on_text: OnText | None):
        self.tokenizer, self.on_text = tokenizer, on_text
        self._texts: dict[int, _Text] = {}
        self._ends: dict[int, End] = {}

    @classmethod
    def of(cls, tokenizer: Any, requests: Sequence[Request], on_text: OnText | None) -> "Watch | None":
        """A watch over these requests; None if there is nothing to find or to pass on."""
        return cls(tokenizer, on_text) if on_text or any(request.stop for request in requests) else None

    def __call__(self, host: Any, held: dict[int, tuple[int, Request]]) -> list[int]:
        """The running rows that wrote a stop string."""
        stopped = []
        for row, (index, request) in held.items() if self.tokenizer is not None else ():
            stop = request.stop
            if index not in self._texts:
                self._texts[index] = _Text(self.tokenizer, request, stop, self.on_text is not None)
            text, running = self._texts[index], host.finish[row] == Finish.RUNNING
            at = text.read(new_tokens(request, host, row, text.count))
            if at is not None or not running:
                tokens = new_tokens(request, host, row)
                end = None if at is None else cut_at_stop(self.tokenizer, request, tokens, stop)
                self._ends[index] = end or (text_of(self.tokenizer, request, tokens), None)
                del self._texts[index]
                if end is not None and running:
                    stopped.append(row)
            come = text.come() if index in self._texts else text.left(self._ends[index][0] or "")
            if self.on_text is not None and come:
                self.on_text(index, come)
        return stopped

    def end(self, index: int) -> End | None:
        """The text of a request whose row has ended; call it once."""
        return self._ends.pop(index, None)


class _Text:
    """The text that a running row has written."""

    def __init__(self, tokenizer: Any, request: Request, stop: tuple[str, ...], shown: bool):
        self.stops = Stops(tokenizer, request, stop) if stop else None
        self.written = Written(tokenizer, request) if shown else None
        self.count = self.given = 0
        self.due = ""
        self.held_back = max(map(len, stop), default=1) - 1  # characters that may begin a stop string

    def read(self, tokens: list[int]) -> int | None:
        """Reads new tokens; returns the start of the first stop string, or None."""
        self.count += len(tokens)
        if self.written is not None and tokens:
            self.due += self.written.add(tokens)
        return None if self.stops is None or not tokens else self.stops.add(tokens)

    def come(self) -> str:
        """The new text of a running row that can be shown: no partial character, and no partial stop string."""
        end = max(0, len(self.due) - self.held_back)
        text, self.due = self.due[:end], self.due[end:]
        self.given += len(text)
        return text

    def left(self, text: str) -> str:
        """The part of a finished text that has not been shown."""
        return text[self.given :]


def new_tokens(request: Request, host: Any, row: int, known: int = 0) -> list[int]:
    """A row's new tokens after the first `known`, from the state's fields for records."""
    begin = int(host.prompt_length[row])
    end = min(int(host.length[row]), begin + request.max_new_tokens)  # a suffix follows
    return host.tokens[row][begin + known : end].tolist()


def text_of(tokenizer: Any, request: Request, tokens: list[int]) -> str | None:
    """The text of a request's new tokens; None without a tokenizer."""
    return new_text(tokenizer, request.ids, tokens, request.is_text)
