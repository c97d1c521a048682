"""The text of one prompt as it comes."""

from collections.abc import Iterator

from specjax.serve.request import Record
from specjax.serve.slots import Turn


class TextStream(Iterator[str]):
    """An iterator over pieces of one prompt's new text, cut between characters. Joined, they are its record's text.

    Args:
      turns: the turns of an engine that completes the one request.
      pieces: receives the text of a turn before the turn is returned.

    Attributes:
      record: the completion, available after the last piece; None before.
    """

    def __init__(self, turns: Iterator[Turn], pieces: list[str]):
        self.record: Record | None = None
        self._left = self._read(turns, pieces)

    def __next__(self) -> str:
        """The next piece.

        Raises:
          RuntimeError: after the last piece, with the record's error, if the text could not be completed.
        """
        return next(self._left)

    def _read(self, turns: Iterator[Turn], pieces: list[str]) -> Iterator[str]:
        for turn in turns:
            for _, self.record in turn.finished:
                pass
            yield from pieces
            pieces.clear()
        if self.record is not None and self.record.error is not None:
            raise RuntimeError(self.record.error)
