"""Speculative thinking (arXiv:2504.12329): a small model writes; if a new step begins with a cue, the large model
writes it.
"""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import new_text
from specjax.search.pair import Pair, writers
from specjax.search.stepwise import Asked, StepwisePair, Written, step_ends, words_of
from specjax.search.writer import Writer


@dataclasses.dataclass(frozen=True)
class SpeculativeThinking(StepwisePair):
    """The small model writes up to a trigger and a little beyond; if that part held a cue, the large model writes instead.

    The part beyond the trigger is always taken back. The large model's turn is a doubt if its `reflect` and `verify`
    cues are at least as many as its `affirm` cues, each counted as often as it occurs. A `verify` cue in it lets it go
    on for `long_turn` tokens.

    At the first trigger after `patience` doubts the small model does not look ahead. Instead the sentence `help` is
    inserted, and the large model continues after it for `long_turn` tokens. With every `help` its next such turn grows,
    and so does the patience.

    Cues ignore case, and are found inside words. Both models keep their caches: each reads the other's text in one pass
    for up to 64 tokens. Without cues the text is the small model's. The defaults are the authors', for reasoning models
    of 1.5B and 32B, but the wording of `help` is this library's.

    Attributes:
      small: the one that writes, see `PairSettings`.
      trigger: a text that a token at the end of a step contains, or the ids of such tokens.
      reflect: cues of doubt.
      affirm: cues of agreement.
      verify: cues of a check.
      peek: how many tokens the small model writes after a trigger to look for cues.
      turn: tokens of the large model's turn.
      long_turn: tokens of its turn after a `verify` cue, and after the first `help`.
      long_turn_growth: by how much the turn after `help` grows each time, to `longest_long_turn` at most.
      patience: doubts before the first `help`.
      patience_growth: by how much that grows each time, to `longest_patience` at most.
      help: a sentence that makes the large model look for mistakes.
      begin: tokens that the large model writes first; the authors' 100 are for small models that do not reason.
      always: whether the large model has its turn at every trigger, with or without a cue, as the authors have it for
        such small models.

    Raises:
      ValueError: for counts below 1, or a `begin` below 0.
    """

    about = About(
        "speculative_thinking", "a small model writes; the large one where a step begins with a cue", "arXiv:2504.12329",
        "own text", fields=("small", "trigger", "peek", "turn", "long_turn", "patience", "help", "begin", "always"),
    )  # fmt: skip
    usual = MappingProxyType({"temperature": 0.6, "top_k": 50, "top_p": 0.95})

    trigger: str | tuple[int, ...] = "\n\n"
    reflect: tuple[str, ...] = ("wait", "alternatively", "hold on", "another")
    affirm: tuple[str, ...] = ("yeah", "yes", "final answer", "confident")
    verify: tuple[str, ...] = ("verify", "think again", "recap", "check")
    peek: int = 20
    turn: int = 20
    long_turn: int = 125
    long_turn_growth: int = 25
    longest_long_turn: int = 200
    patience: int = 15
    patience_growth: int = 5
    longest_patience: int = 30
    help: str = "Let me look at the steps so far for a mistake:"
    begin: int = 0
    always: bool = False

    def __post_init__(self):
        for name, least in {"peek": 1, "turn": 1, "long_turn": 1, "patience": 1, "begin": 0}.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {getattr(self, name)!r}")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """A text for every prompt, in order; its `steps` say which model wrote each ("help" for the inserted sentence).

        Args:
          model: the large model, from `specjax.models.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt; both models share it.
          batch_size: prompts that are written side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`, for both models; without a temperature, 0.6 with a `top_k` of 50 and a
            `top_p` of 0.95.

        Raises:
          ValueError: see `Asked.of` and `step_ends`; also without a tokenizer, because cues are found in text.
        """
        sampling = self.published(sampling)
        small = self.partner_of(model)
        asked = Asked.of([model, small], prompts, max_new_tokens, seed, sampling, keys)
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
        self.patience = np.full(large.rows, method.patience)
        self.long_turn = np.full(large.rows, method.long_turn)

    def run(self) -> list[Written]:
        """Runs all of them to their end."""
        little, count = self.little, len(self.asked.ids)
        if self.method.begin:
            self._take_over(np.arange(little.rows) < count, self.method.begin)
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
        """At a trigger: after many doubts the large model gets help; otherwise it has its turn if a cue lies ahead."""
        method, little = self.method, self.little
        lost = rows & (self.doubts >= self.patience)
        self._help(lost)
        rows = rows & ~lost
        if not method.always:
            before = little.length.copy()
            peeked = little.write(rows, method.peek, step=False)
            little.back(before)
            rows = rows & np.asarray([self._mood(text) != 0 for text in peeked])
        wrote = self._take_over(rows, method.turn)
        self.doubts += np.asarray([self._mood(text) < 0 for text in wrote])
        checks = np.asarray([self._count(text, method.verify) > 0 for text in wrote])
        self._take_over(checks, method.long_turn)

    def _help(self, rows):
        """The sentence that makes the large model look for mistakes, and the text that it then writes."""
        method, little = self.method, self.little
        rows = rows & (little.length + len(self.help) < little.most)
        text = [list(self.help) if row else [] for row in rows]
        little.read(text)
        self._add(text, "help")
        self._take_over(rows, self.long_turn)
        self.doubts[rows] = 0
        turn = np.minimum(self.long_turn + method.long_turn_growth, method.longest_long_turn)
        patience = np.minimum(self.patience + method.patience_growth, method.longest_patience)
        self.long_turn, self.patience = np.where(rows, turn, self.long_turn), np.where(rows, patience, self.patience)

    def _take_over(self, rows, most):
        """The large model reads what it missed and writes in some rows; the small model reads the result. Returns the
        new text.
        """
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

    def _mood(self, tokens):
        """1 if tokens affirm more than they doubt, -1 if they do not but contain a cue, 0 if they contain none."""
        affirms = self._count(tokens, self.method.affirm)
        doubts = self._count(tokens, (*self.method.reflect, *self.method.verify))
        return 1 if affirms > doubts else -1 if doubts else 0

    def _count(self, tokens, cues):
        text = (new_text(self.large.model.tokenizer, (), tokens) or "").lower()
        return sum(text.count(cue.lower()) for cue in cues)

    def _add(self, texts, by):
        for row, tokens in enumerate(texts):
            if tokens:
                self.steps[row].append(self.made(row, tokens, by))
