"""CHOPS (arXiv:2506.20544): a model writes a checklist for a prompt, and one pass over all completions takes one of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import encoded, new_text
from specjax.search.pool import (
    SPARE,
    Drawn,
    Pool,
    asked_in_words,
    blocks,
    check_fits,
    check_place,
    going_on,
    passes_of,
    reply_scores,
)
from specjax.search.stepwise import Asked, Stepwise, Written, words_of
from specjax.search.writer import Writer

CHECKLIST = (
    "\n\nDo not answer this yet. Write a short checklist for judging answers to it, in its own language and for its kind of "
    "task, one point a line."
)


@dataclasses.dataclass(frozen=True)
class Chops(Stepwise):
    """Checklisted one-pass selection: draws several completions, and the model names the best one by a checklist.

    The model first writes a checklist for this prompt, greedily. Then it reads the prompt, the checklist and all completions
    at once. The completion is taken whose number makes `reply` likeliest; this library scores the replies, so that one is
    always named. If all completions are the same, nothing is asked. The words of the questions are this library's.

    The completions are those that `specjax.generate` draws at this seed (`num_return_sequences`), except that the first one
    is greedy if `hedged`. All must fit into the model's positions beside the prompt.

    Attributes:
      samples: completions; 1 is the greedy text, if `hedged`.
      hedged: whether the first one is greedy (hedged sampling).
      checklist: the request for the checklist, after the prompt.
      checklist_tokens: the most tokens of the checklist; 0 for none.
      before: the text between the prompt and the completions, with the place `{checklist}`.
      each: the text of a completion; `{number}` counts from 1.
      after: the question after them.
      reply: the reply that is scored, with the place `{number}`.

    Raises:
      ValueError: for counts that are too small, or if there is no place for the checklist, a completion or a number.
    """

    about = About(
        "chops", "completions, and the one that the model names by a checklist of its own", "arXiv:2506.20544", "own text"
    )  # fmt: skip

    samples: int = 5
    hedged: bool = True
    checklist: str = CHECKLIST
    checklist_tokens: int = 256
    before: str = "\n\nA good answer fulfils these points:\n{checklist}\n\nThese answers were given:\n"
    each: str = "{number}. {answer}\n"
    after: str = "Which of them fulfils the points best? Say its number."
    reply: str = " The best answer is number {number}."

    def __post_init__(self):
        for name, least in (("samples", 1), ("checklist_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        for name, place, others in (
            ("before", "checklist", {}),
            ("each", "answer", {"number": 1}),
            ("reply", "number", {}),
        ):
            check_place(name, getattr(self, name), place, **others)

    @property
    def draws(self) -> int:
        return self.samples

    def question(self, prompt: Any, checklist: str, answers: Sequence[str]) -> Any:
        """The last prompt: a text, or chat messages of which the last one continues."""
        listed = "".join(self.each.format(number=i, answer=text.strip()) for i, text in enumerate(answers, 1))
        return going_on(prompt, self.before.format(checklist=checklist.strip()) + listed + self.after)

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 4,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """For every prompt in order, the completion that the model names.

        `steps` are the completions, each with the log-probability of the reply that names it as its score, and `score` is that
        of the one that was taken.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts or chats.
          max_new_tokens: the most tokens of a completion.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side, with `samples` rows each.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`, for the completions; several need a temperature.

        Raises:
          ValueError: see `Asked.of`; also for several greedy completions, prompts of ids, or completions that might not
            fit.
        """
        asked = asked_in_words(model, prompts, max_new_tokens, seed, sampling, keys, self.draws, self.samples)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        room = 0
        if self.samples > 1:
            frames = [encoded(model, self.question(prompt, "", [""] * self.samples)) for prompt in asked.prompts]
            requests = [encoded(model, going_on(prompt, self.checklist)) for prompt in asked.prompts]
            most = self.checklist_tokens + SPARE + self.samples * (max_new_tokens + SPARE)
            room = max(map(len, frames)) + most + max(map(len, self._replies(model)))
            room = max(room, max(map(len, requests)) + self.checklist_tokens)
            check_fits(model, room, self.samples, max_new_tokens)
        lanes = len(parts[0].ids)
        pool = Pool(model, lanes, self.samples, asked, hedged=self.hedged)
        judge = (
            Writer(model, lanes, dataclasses.replace(asked, sampling={}), (), room=room) if self.samples > 1 else None
        )
        return [found for part in parts for found in self._part(pool, judge, part)]

    def _replies(self, model: Any) -> list[tuple[int, ...]]:
        """The reply that names each completion."""
        return [words_of(model, self.reply.format(number=i)) for i in range(1, self.samples + 1)]

    def _part(self, pool: Pool, judge: Writer | None, part: Asked) -> list[Written]:
        """Some prompts side by side."""
        drawn = pool.draw(part)
        differ = [lane for lane, own in enumerate(drawn) if len({one.text for one in own if one.end != "error"}) > 1]
        told: dict[int, tuple[list[float], int]] = {}
        if differ and judge is not None:
            pick = lambda values: tuple(values[lane] for lane in differ)
            mine = dataclasses.replace(
                part, prompts=pick(part.prompts), ids=pick(part.ids), keys=part.keys[differ][:, 0]
            )
            told = dict(zip(differ, self._judged(judge, mine, [drawn[lane] for lane in differ]), strict=True))
        return [
            self._taken(prompt, own, told.get(lane))
            for lane, (prompt, own) in enumerate(zip(part.prompts, drawn, strict=True))
        ]

    def _judged(self, judge: Writer, asked: Asked, drawn: Sequence[Sequence[Drawn]]) -> list[tuple[list[float], int]]:
        """For every prompt the score of each completion, and the passes that it took; no scores where there is no room.

        Completions may be longer when they are read than when they were written, since bytes that are no character are.
        """
        model, count = judge.model, len(asked.ids)
        passes, lists = np.zeros(count, np.int64), [""] * count
        if self.checklist_tokens:
            asks = tuple(encoded(model, going_on(prompt, self.checklist)) for prompt in asked.prompts)
            judge.enter(dataclasses.replace(asked, ids=asks, max_new_tokens=self.checklist_tokens))
            written = judge.write(np.arange(judge.rows) < count, self.checklist_tokens, step=False)
            lists = [new_text(model.tokenizer, *own) or "" for own in zip(asks, written, strict=False)]
            passes += judge.passes[:count] + blocks(asks, asked.ids)
        texts = [[one.text for one in own] for own in drawn]
        ids = tuple(encoded(model, self.question(*own)) for own in zip(asked.prompts, lists, texts, strict=True))
        replies = self._replies(model)
        fits = [len(own) + max(map(len, replies)) <= judge.longest for own in ids]
        read = tuple(own if ok else short for own, ok, short in zip(ids, fits, asked.ids, strict=True))
        judge.enter(dataclasses.replace(asked, ids=read))
        scores = reply_scores(judge, [replies if ok else [] for ok in fits])
        passes += judge.passes[:count] + blocks(read, asked.ids)
        return list(zip(scores, passes.tolist(), strict=True))

    def _taken(self, prompt: Any, drawn: Sequence[Drawn], told: tuple[list[float], int] | None) -> Written:
        """The completion that was named, or the first one that did not fail."""
        scores, passes = ([0.0] * len(drawn), 0) if told is None else told
        if not scores:  # the question about them had no room
            steps, at = (
                tuple(one.step for one in drawn),
                next((i for i, own in enumerate(drawn) if own.end != "error"), 0),
            )
            return Written(
                prompt, steps[at].text, list(steps[at].tokens), drawn[at].end, passes_of(drawn) + passes, steps=steps
            )
        steps = tuple(dataclasses.replace(one.step, score=own) for one, own in zip(drawn, scores, strict=True))
        whole = [at for at, one in enumerate(drawn) if one.end != "error"] or [0]
        at = max(whole, key=lambda own: (scores[own], -own))
        end = "error" if math.isnan(sum(scores)) else drawn[at].end
        spent = passes_of(drawn) + passes
        return Written(prompt, steps[at].text, list(steps[at].tokens), end, spent, steps=steps, score=scores[at])
