"""Speculative thinking (arXiv:2504.12329): a small model writes, and where a new step begins with a cue the large one does."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import new_text
from specjax.search.pair import Pair, writers
from specjax.search.stepwise import Asked, Stepwise, Written, step_ends, words_of
from specjax.search.writer import Writer


@dataclasses.dataclass(frozen=True)
class SpeculativeThinking(Stepwise):
    """The small model writes to a trigger and a little beyond. A cue there is taken back, and the large model writes.

    What the large model wrote is searched for `verify` cues in turn, which let it go on for longer. After so many `reflect`
    cues the sentence `help` is put in and the large model goes on behind it; both of its turns grow then. Upper and lower case
    are one. Both models keep their caches: each reads what the other wrote in one pass for up to 64 tokens. Without cues the
    text is the small model's.

    Attributes:
      trigger: what a token holds that ends a step, or the ids of such tokens.
      reflect: cues of doubt.
      affirm: cues of agreement.
      verify: cues of a check.
      peek: tokens that the small model writes behind a trigger, where cues are looked for.
      turn: tokens of the large model's turn, at first; `turn_growth` more after every `help`, to `longest_turn` at most.
      long_turn: of its longer turn, at first; likewise.
      patience: `reflect` cues before `help`.
      help: a sentence that makes it look for mistakes.

    Raises:
      ValueError: on counts below 1.
    """

    about = About(
        "speculative_thinking", "a small model writes; the large one where a step begins with a cue", "arXiv:2504.12329",
        "own text", fields=(),
    )  # fmt: skip

    trigger: str | tuple[int, ...] = "\n\n"
    reflect: tuple[str, ...] = ("wait", "alternatively", "hold on", "another")
    affirm: tuple[str, ...] = ("yeah", "yes", "final answer", "confident")
    verify: tuple[str, ...] = ("verify", "think again", "recap", "check")
    peek: int = 20
    turn: int = 20
    long_turn: int = 125
    turn_growth: int = 5
    longest_turn: int = 30
    long_turn_growth: int = 25
    longest_long_turn: int = 200
    patience: int = 15
    help: str = "Let me look at the steps so far for a mistake:"

    def __post_init__(self):
        for name in ("peek", "turn", "long_turn", "patience"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {getattr(self, name)!r}")

    def __call__(
        self,
        model: Any,
        small: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        **sampling: Any,
    ) -> list[Written]:
        """A text for every prompt, in order; its `steps` say whose they are ("help" for the sentence put in).

        Args:
          model: the large model, of `specjax.models.load`.
          small: the small one, of the same vocabulary.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: at most so many for each.
          seed: with a prompt it decides the noise, which both models share.
          batch_size: prompts that are written side by side.
          **sampling: as of `specjax.generate`, of both models.

        Raises:
          ValueError: see `Asked.of` and `step_ends`; without a tokenizer, which cues are found with.
        """
        asked = Asked.of([model, small], prompts, max_new_tokens, seed, sampling)
        stops, help = step_ends(model, self.trigger), words_of(model, self.help)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        both = writers(model, small, len(parts[0].ids), asked, stops, len(help))
        return [found for part in parts for found in _Rows(self, *both, part, help).run()]


class _Rows(Pair):
    """The small model's rows hold the text; the large model's are behind until its turn."""

    def __init__(self, method: SpeculativeThinking, large: Writer, little: Writer, asked: Asked, help):
        super().__init__(large, little, asked)
        self.method, self.help = method, help
        self.doubts = np.zeros(large.rows, int)
        self.turn = np.full(large.rows, method.turn)
        self.long_turn = np.full(large.rows, method.long_turn)

    def run(self) -> list[Written]:
        """All of them to their end."""
        little, count = self.little, len(self.asked.ids)
        while True:
            live = np.asarray([row < count and not little.over(row) for row in range(little.rows)])
            if not live.any():
                break
            self._add(little.write(live, little.capacity), "small")
            self._look(np.asarray([live[row] and not little.over(row) for row in range(little.rows)]))
        return [self.written(row, little, self._reason(row)) for row in range(count)]

    def _reason(self, row):
        return "error" if self.large.failed[row] else self.little.reason(row)

    def _look(self, rows):
        """Behind a trigger: the small model goes on a little, and where that holds a cue the large one does in its place."""
        method, little = self.method, self.little
        before = little.length.copy()
        peeked = little.write(rows, method.peek, step=False)
        cues = [self._cue(text) if rows[row] else "" for row, text in enumerate(peeked)]
        cued = np.asarray([cue != "" for cue in cues])
        self._add([[] if cued[row] else text for row, text in enumerate(peeked)], "small")
        if not cued.any():
            return
        little.back(np.where(cued, before, little.length))
        self.doubts += np.asarray([cue == "reflect" for cue in cues])
        wrote = self._take_over(cued, self.turn)
        checks = np.asarray([bool(text) and self._holds(text, method.verify) for text in wrote])
        self._take_over(checks, self.long_turn)
        lost = self.doubts >= method.patience
        if lost.any():
            self._help(lost)

    def _help(self, rows):
        """The sentence that makes the large model look for mistakes, and what it writes then."""
        method, little = self.method, self.little
        rows = rows & (little.length + len(self.help) < little.most)
        self.doubts[rows] = 0
        text = [list(self.help) if row else [] for row in rows]
        if rows.any():
            little.read(text)
            self._add(text, "help")
            self._take_over(rows, self.long_turn)
        self.turn = np.where(rows, np.minimum(self.turn + method.turn_growth, method.longest_turn), self.turn)
        grown = np.minimum(self.long_turn + method.long_turn_growth, method.longest_long_turn)
        self.long_turn = np.where(rows, grown, self.long_turn)

    def _take_over(self, rows, most):
        """The large model reads what it missed and writes in some rows; the small one reads that. Returns what it wrote."""
        large, little = self.large, self.little
        rows = rows & np.asarray([not little.over(row) for row in range(little.rows)])
        if not rows.any():
            return [[] for _ in rows]
        missed = [
            little.tokens[row, large.length[row] : little.length[row]].tolist() if on else []
            for row, on in enumerate(rows)
        ]
        large.read(missed)
        wrote = large.write(rows, most, step=False)
        little.read(wrote)
        self._add(wrote, "large")
        return wrote

    def _cue(self, tokens):
        """Which kind of cue tokens hold; empty of none."""
        for kind in ("affirm", "reflect", "verify"):
            if self._holds(tokens, getattr(self.method, kind)):
                return kind
        return ""

    def _holds(self, tokens, cues):
        text = (new_text(self.large.model.tokenizer, (), tokens) or "").lower()
        return any(cue.lower() in text for cue in cues)

    def _add(self, texts, by):
        for row, tokens in enumerate(texts):
            if tokens:
                self.steps[row].append(self.made(row, tokens, by))
