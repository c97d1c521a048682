"""Rows in which a large and a small model write together, step by step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.models.text import new_text
from specjax.search.stepwise import Asked, Step, Written, partner
from specjax.search.writer import Writer


def writers(
    model: Any, small: Any, rows: int, asked: Asked, stops: Sequence[int], room: int, way: Any = None
) -> tuple[Writer, Writer]:
    """Rows of both models for the same texts; see `Writer`. `way` is how the large one decodes."""
    large = Writer(model, rows, asked, stops, room=room, way=way)
    return large, Writer(partner(model, small), rows, asked, stops, room=room)


class Pair:
    """Some prompts side by side.

    Attributes:
      large: the large model's rows.
      little: the small one's.
      asked: the prompts.
      steps: the steps of each text so far.
    """

    def __init__(self, large: Writer, little: Writer, asked: Asked):
        self.large, self.little, self.asked = large, little, asked
        large.enter(asked)
        little.enter(asked)
        large.most[:] = little.most[:] = np.minimum(large.most, little.most)
        self.steps: list[list[Step]] = [[] for _ in asked.ids]

    def text(self, row: int, tokens: Sequence[int]) -> str | None:
        """A whole text after the prompt."""
        return new_text(self.large.model.tokenizer, self.asked.ids[row], tokens)

    def so_far(self, row: int) -> list[int]:
        """The tokens of a row's steps."""
        return [token for step in self.steps[row] for token in step.tokens]

    def made(self, row: int, tokens: Sequence[int], by: str, score: float | None = None) -> Step:
        """The next step of a row."""
        before = (*self.asked.ids[row], *self.so_far(row))
        return Step(tuple(tokens), new_text(self.large.model.tokenizer, before, tokens), by, score)

    def written(self, row: int, writer: Writer, reason: str, score: float | None = None) -> Written:
        """The contents of a row of one of the two models."""
        tokens = writer.new(row)
        passes = int(self.large.passes[row]), int(self.little.passes[row])
        return Written(
            self.asked.prompts[row], self.text(row, tokens), tokens, reason, *passes, tuple(self.steps[row]), score
        )
