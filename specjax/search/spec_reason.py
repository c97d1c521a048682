"""SpecReason (arXiv:2504.07891): a small model proposes a step, and the base model accepts it or writes the step itself."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.draft.base import View
from specjax.draft.model import ModelDrafter
from specjax.expand import Chain
from specjax.models.messages import next_turn
from specjax.search.pair import Pair, writers
from specjax.search.stepwise import Asked, Step, StepwisePair, Written, step_ends, words_of
from specjax.search.writer import Writer
from specjax.settings import settled
from specjax.sharding.distributed import to_host
from specjax.speculative import speculative

DIGITS = ("digit", "mean_digit")
SCORES = (*DIGITS, "likelihood")
"""How the base model may score a step.

Either the digit that it writes; or the mean of the digits that it might write, weighted by their probabilities among
all digits; or the geometric mean of the probabilities of the step's tokens.
"""


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A step that is to be scored.

    Attributes:
      prompt: as given.
      text: the text after it, this step included; None without a tokenizer.
      step: the step.
      logprobs: of its tokens, under the base model's own softmax.
    """

    prompt: Any
    text: str | None
    step: Step
    logprobs: tuple[float, ...]


Score = Callable[[Sequence[Proposed]], Sequence[float]]
"""From steps, which may belong to several prompts, to a score for each."""


@dataclasses.dataclass(frozen=True)
class SpecReason(StepwisePair):
    """Step by step, the small model writes, and the base model reads that in one pass and accepts it or writes the step
    itself.

    Both keep their caches: a rejected step is taken back, and the small model reads the base model's step in one pass.
    A step's score is the digit that the base model writes after `question`; anything but a digit counts as 0. If no
    step is as long as `step_tokens`, a threshold above the highest score gives the base model's own text, and 0 the
    small model's.

    The defaults are the authors', but the wording is this library's. Their program asks for the ten likeliest tokens,
    and takes the mean over the digits among them.

    A text ends where the model ends it. As published, it also ends with a step that contains one of `answers`, or from
    the third step on with one that repeats the step before it.

    With `drafts` the base model's own steps are decoded speculatively, and the small model drafts them too (the published
    combination). The text is the same with any number of drafts.

    Attributes:
      small: the proposing model, see `PairSettings`.
      threshold: a step is accepted from this score on.
      score: one of `SCORES`, or a function. The likelihood is between 0 and 1, digits between 0 and 9.
      question: what the base model is asked after a step. In a chat it is a user's turn; otherwise it continues the
        text, and the digit follows it.
      reply: in a chat, the beginning of the base model's answer; the digit follows it.
      first: how many steps the base model writes first, unasked.
      separator: a text that the last token of a step contains, or the ids of such tokens. A separator text is also
        appended to a step that was cut.
      step_tokens: tokens of a step, at most.
      answers: texts; a step that contains one is the last.
      drafts: how many tokens the small model drafts at a time where the base model writes a step; 0: none.

    Raises:
      ValueError: for an unknown score, a threshold that is not a number, or counts that are too small.
    """

    about = About(
        "spec_reason", "a small model's steps, where the base model scores them high enough", "arXiv:2504.07891",
        "own text", fields=("small", "threshold", "score", "first", "separator", "step_tokens", "drafts"),
    )  # fmt: skip
    usual = MappingProxyType({"temperature": 0.6, "top_p": 0.95})

    threshold: float = 7.0
    score: str | Score = "digit"
    question: str = (
        "\n\nIs the last step right, and does it follow from those before? From 0 (wrong) to 9 (right), its score is "
    )
    reply: str = "The score of the last step is "
    first: int = 0
    separator: str | tuple[int, ...] = "\n\n"
    step_tokens: int = 512
    answers: tuple[str, ...] = ("boxed", "Answer:", "ANSWER:")
    drafts: int = 0

    def __post_init__(self):
        if isinstance(self.score, str) and self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}; choose {', '.join(SCORES)}, or give a function")
        if math.isnan(self.threshold):
            raise ValueError("threshold must be a number, got nan")
        if self.step_tokens < 1 or self.first < 0:
            raise ValueError(
                f"step_tokens must be at least 1 and first at least 0, got {self.step_tokens} and {self.first}"
            )
        if isinstance(self.drafts, bool) or not isinstance(self.drafts, int) or self.drafts < 0:
            raise ValueError(f"drafts must be a whole number from 0 on, got {self.drafts!r}")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 8192,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """A text for every prompt, in order; its `steps` say which model wrote each and its score, and `score` is the mean.

        Args:
          model: the base model, from `specjax.models.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt; both models share it.
          batch_size: prompts that are written side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`, for both models; without a temperature, 0.6 and a `top_p` of 0.95.

        Raises:
          ValueError: see `Asked.of` and `step_ends`; also for digits without a tokenizer, or if no token is a digit.
        """
        sampling = self.published(sampling)
        small = self.partner_of(model)
        asked = Asked.of([model, small], prompts, max_new_tokens, seed, sampling, keys)
        stops = step_ends(model, self.separator)
        behind = words_of(model, self.separator) if isinstance(self.separator, str) else ()
        digits = _digits(model) if self.score in DIGITS else {}
        questions = [self._question(model, prompt) if digits else () for prompt in asked.prompts]
        parts = asked.parts(batch_size)
        if not parts:
            return []
        room = len(behind) + max(map(len, questions))
        way = None
        if self.drafts:
            drafter = ModelDrafter(small.lm, Chain(self.drafts))
            way = speculative(model.lm, drafter), {"target": model.params, "draft": small.params}
        both = writers(model, small, len(parts[0].ids), asked, stops, room, way)
        found, questions = [], iter(questions)
        for part in parts:
            own = [next(questions) for _ in part.ids]
            found += _Rows(self, *both, part, own, digits, behind).run()
        return found

    def _question(self, model, prompt):
        """The text that is read after a step of this prompt, before a digit is written."""
        if not isinstance(prompt, str) and isinstance(prompt[0], Mapping):
            return tuple(next_turn(model.tokenizer, self.question.strip(), self.reply, model.name))
        return words_of(model, self.question)


def _digits(model):
    """The ids of tokens that are a digit, and their digits.

    Raises:
      ValueError: if there are none, or there is no tokenizer.
    """
    words_of(model, "")
    texts = ((token, model.tokenizer.decode([token]).strip()) for token in range(model.lm.vocab_size))
    found = {token: int(text) for token, text in texts if len(text) == 1 and text in "0123456789"}
    if not found:
        raise ValueError(
            f"no token of {model.name} is a digit, so it gives no digit scores: set score=likelihood, or give a function"
        )
    return found


def mean_digit(logprobs: np.ndarray, digits: Sequence[int]) -> float:
    """The mean of digits, weighted by their probabilities among themselves.

    Args:
      logprobs: `[M]`, of tokens that are digits, natural logarithms.
      digits: `[M]`, which.

    >>> round(mean_digit(np.asarray([-6.5, -7.0]), [8, 3]), 4)
    6.1123
    """
    weights = np.exp(np.asarray(logprobs, np.float64) - np.max(logprobs))
    return float(weights @ np.asarray(digits) / weights.sum())


class _Rows(Pair):
    """The large model's rows hold the text."""

    def __init__(self, method: SpecReason, large: Writer, little: Writer, asked: Asked, questions, digits, behind):
        super().__init__(large, little, asked)
        self.method, self.questions, self.digits, self.behind = method, questions, digits, behind
        self.done = np.zeros(large.rows, bool)
        self.there = np.zeros(large.rows, bool)

    def run(self) -> list[Written]:
        """Runs all of them to their end."""
        large, count = self.large, len(self.asked.ids)
        while True:
            live = np.asarray([row < count and not large.over(row) for row in range(large.rows)]) & ~self.done
            if not live.any():
                break
            self._step(live)
        return [self._written(row) for row in range(count)]

    def _step(self, live):
        """One step in the live rows."""
        large, little, method = self.large, self.little, self.method
        self.there = live
        before = large.length.copy()
        begun = np.asarray(
            [row < len(self.steps) and len(self.steps[row]) >= method.first for row in range(large.rows)]
        )
        proposed = self._closed(little, little.write(live & begun, method.step_tokens))
        scores = self._scores(proposed)
        taken = np.asarray([score is not None and score >= method.threshold for score in scores])
        large.back(before + np.where(taken, [len(step) for step in proposed], 0))
        own = self._closed(large, self._rewritten(live & ~taken))
        little.back(before + np.where(taken, [len(step) for step in proposed], 0))
        for row in np.flatnonzero(live).tolist():
            tokens, by = (proposed[row], "small") if taken[row] else (own[row], "large")
            self.steps[row].append(self.made(row, tokens, by, scores[row]))
            self.done[row] = self._finished(self.steps[row])
        little.read([[] if large.over(row) or self.done[row] else text for row, text in enumerate(own)])

    def _rewritten(self, rows):
        """The large model's own steps in some rows."""
        large, drafts = self.large, self.method.drafts
        if not drafts or not rows.any():
            return large.write(rows, self.method.step_tokens)
        given = jax.device_put((self.there, large.length.astype(np.int32)))
        large.state, reads = _caught_up(large.decoder, large.params, large.state, *given)
        before, reads = large.passes.copy(), to_host(reads)
        steps = large.write(rows, self.method.step_tokens)
        self.little.passes += np.where(rows, reads + drafts * (large.passes - before), 0)
        return steps

    def _closed(self, writer, steps):
        """Steps, with a separator after those that were cut."""
        most = self.method.step_tokens
        cut = [
            len(step) == most and step[-1] not in writer.stops and not writer.over(i) for i, step in enumerate(steps)
        ]
        more = [self.behind if own else () for own in cut & (writer.length + len(self.behind) <= writer.most)]
        writer.read(more)
        return [[*step, *own] for step, own in zip(steps, more, strict=True)]

    def _finished(self, steps):
        """Whether the last of these steps ends the text."""
        said = [self._said(step) for step in steps[-2:]]
        return (
            len(steps) > 2 and said[0] == said[1] or any(word in (steps[-1].text or "") for word in self.method.answers)
        )

    def _said(self, step):
        """A step without its end."""
        separator = self.method.separator
        return (step.text or "").partition(separator)[0] if isinstance(separator, str) else step.tokens

    def _scores(self, proposed):
        """The base model's scores of the steps that it reads; None where there is no step."""
        method, rows = self.method, [row for row, step in enumerate(proposed) if step]
        if not rows:
            return [None] * len(proposed)
        text = [[*step, *self._asking(row, step)] if step else [] for row, step in enumerate(proposed)]
        heard = self.large.read(text, tuple(self.digits) or (0,))
        said = [tuple(heard.logprobs[row][: len(proposed[row])]) for row in rows]
        if method.score == "digit":
            found = [float(self.digits.get(int(heard.top[row]), 0)) for row in rows]
        elif method.score == "mean_digit":
            found = [mean_digit(heard.after[row], [*self.digits.values()]) for row in rows]
        elif callable(method.score):
            found = self._asked_of(method.score, rows, proposed, said)
        else:
            found = [math.exp(math.fsum(own) / len(own)) for own in said]
        scores: list[float | None] = [None] * len(proposed)
        for row, score in zip(rows, found, strict=True):
            scores[row] = score
        return scores

    def _asking(self, row, step):
        """The text that is read after a step; if the step has already ended its turn, the turn is not ended again."""
        own, last = self.questions[row], step[-1]
        return own[1:] if last in self.large.model.eos_ids and own[:1] == (last,) else own

    def _asked_of(self, score, rows, proposed, said):
        """The scores from a user's function.

        Raises:
          ValueError: if that is not one number for each.
        """
        asked = []
        for row, logprobs in zip(rows, said, strict=True):
            step = self.made(row, proposed[row], "small")
            text = self.text(row, [*self.so_far(row), *proposed[row]])
            asked.append(Proposed(self.asked.prompts[row], text, step, logprobs))
        found = [float(number) for number in score(asked)]
        if len(found) != len(rows) or any(math.isnan(score) for score in found):
            raise ValueError(f"the score must be one number per step: {len(found)} for {len(rows)}, or NaN")
        return found

    def _written(self, row):
        scores = [step.score for step in self.steps[row] if step.score is not None]
        reason = self.large.reason(row) if self.large.over(row) else "stop"
        return self.written(row, self.large, reason, float(np.mean(scores)) if scores else None)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
@settled
def _caught_up(decoder, params, state, live, length):
    """The state in which the drafter has read the texts of the live rows `[B]`, and how many passes that took in each `[B]`."""
    drafter, own = decoder.drafter, state.draft
    own = dataclasses.replace(own, length=jnp.minimum(own.length, length - 1))
    view = View(state.tokens, length, live, state.cache, max_depth=drafter.depth)
    width = drafter.depth + 1
    reads = jnp.maximum(-((own.length + width - length) // width), 0)
    return dataclasses.replace(state, draft=drafter.catch_up(params, own, view)), reads
