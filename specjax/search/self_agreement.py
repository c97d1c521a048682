"""Self-agreement (arXiv:2311.08154): draws several completions, then asks the model which answer most of them give."""

import dataclasses
import math
import os.path
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import encoded, new_text
from specjax.sampling_params import SamplingArrays
from specjax.search.pool import SPARE, Pool, asked_in_words, check_fits, going_on, reply_scores
from specjax.search.selection import answer_of
from specjax.search.stepwise import Asked, Step, Stepwise, Written, words_of
from specjax.search.writer import Writer

ANSWER = r"(?:answer is:?|\\boxed\{)[\s*$\\({]*(?:boxed\{)?(-?\d+(?:,\d{3})*(?:\.\d+)?|[^\s.*$}][^\n.*$}]*)"
"""The number, or else the words up to the next full stop or line, after "answer is" or within a box."""


@dataclasses.dataclass(frozen=True)
class SelfAgreement(Stepwise):
    """Draws completions of a prompt, puts them after it, and asks for the answer that most of them give.

    The reply is one of the completions' own answers, the one that makes `reply` likeliest; the text is that of the first
    completion with this answer. If all completions with an answer agree, nothing is asked. If none has an answer, the
    model replies in its own words, greedily, as published.

    The completions are those that `specjax.generate` draws at this seed (`num_return_sequences`). The prompt is read
    once, for all of them and for the common beginning of the two prompts. All completions must fit into the model's
    positions beside the prompt.

    Attributes:
      samples: completions.
      before: the text between the prompt and the completions.
      each: the text of a completion; `{number}` counts from 1.
      after: the question after them.
      answer: a regular expression that finds a completion's answer, as in `specjax.search.Selection`; empty: the model
        always replies in its own words.
      reply: the reply that is scored, a text with the place `{answer}`.

    Raises:
      ValueError: for fewer than one completion, if there is no place for a completion or an answer, or for a wrong
        regular expression.
    """

    about = About(
        "self_agreement", "asks the model for the answer of most of its completions", "arXiv:2311.08154", "own text",
    )  # fmt: skip

    samples: int = 8
    before: str = "\n\nSeveral answers to this were given:\n"
    each: str = "{number}. {answer}\n"
    after: str = "Which final answer do most of them agree on? Say that answer."
    answer: str = ANSWER
    reply: str = " The answer is {answer}."

    def __post_init__(self):
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be a whole number from 1 on, got {self.samples!r}")
        if "{answer}" not in self.each:
            raise ValueError(f"each must hold {{answer}}, the place of a completion, got {self.each!r}")
        if self._replied("") == self._replied("0"):
            raise ValueError(f"reply must hold {{answer}}, the place of an answer, got {self.reply!r}")
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(f"answer must be a regular expression, got {self.answer!r}: {error}") from error

    @property
    def draws(self) -> int:
        return self.samples

    def question(self, prompt: Any, answers: Sequence[str]) -> Any:
        """The second prompt: a text, or chat messages of which the last one continues."""
        listed = "".join(self.each.format(number=i, answer=text.strip()) for i, text in enumerate(answers, 1))
        return going_on(prompt, f"{self.before}{listed}{self.after}")

    def _replied(self, answer: str) -> str:
        """The reply that names an answer.

        Raises:
          ValueError: if the template has another place than `{answer}`.
        """
        try:
            return self.reply.format(answer=answer)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"reply has {{answer}} as its only place, got {self.reply!r}") from error

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
        """For every prompt in order, the completion with the answer on which most agree, or the model's own words.

        `steps` are the completions, and `score` is the log-probability of the reply that was taken.

        Args:
          model: from `specjax.models.load`.
          prompts: a list of texts or chats.
          max_new_tokens: the most tokens of a completion, and of the final answer.
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
        frame = max(len(encoded(model, self.question(prompt, [""] * self.samples))) for prompt in asked.prompts)
        room = frame + self.samples * (max_new_tokens + SPARE) + len(words_of(model, self._replied("")))
        check_fits(model, room + max_new_tokens, self.samples, max_new_tokens)
        lanes = len(parts[0].ids)
        greedy = dataclasses.replace(asked, sampling={})
        pool = Pool(model, lanes, self.samples, asked, room=room)
        judge = Writer(model, lanes, greedy, (), room=room)
        return [found for part in parts for found in self._part(pool, judge, part)]

    def _part(self, pool: Pool, judge: Writer, asked: Asked) -> list[Written]:
        """Some prompts side by side."""
        drawn, lanes = pool.draw(asked), judge.rows
        judge.fork(pool.prompts, np.arange(lanes), np.zeros((lanes, 2), np.uint32))
        judge.state = dataclasses.replace(judge.state, sampling=SamplingArrays.make(lanes))
        found = []
        for prompt, ids, own in zip(asked.prompts, asked.ids, drawn, strict=True):
            said = [self._said(one.text, one.end) for one in own]
            found.append(_Chains(prompt, ids, tuple(one.step for one in own), [one.end for one in own], said))
        return self._judged(judge, asked, found)

    def _said(self, text: str, end: str) -> str | None:
        """The answer of a completion that ended so; None of none."""
        return answer_of(text, self.answer) if self.answer and end != "error" else None

    def _judged(self, judge: Writer, asked: Asked, chains: "list[_Chains]") -> list[Written]:
        """The final answers, from the completions of every prompt."""
        second, fits = self._asked(judge, asked, chains)
        count, model = len(chains), judge.model
        scores = self._scores(judge, [own.answers if ok else [] for own, ok in zip(chains, fits, strict=True)])
        judge.begin = judge.length.copy()
        free = np.asarray([not own.answers and ok for own, ok in zip(chains, fits, strict=True)])
        judge.most[:count] = judge.length[:count] + np.where(free, asked.max_new_tokens, 0)
        said = judge.write(np.arange(judge.rows) < count, asked.max_new_tokens, step=False)
        found = []
        for lane, own in enumerate(chains):
            passes = sum(len(step.tokens) for step in own.steps) + int(judge.passes[lane])
            if own.answers and fits[lane]:
                at = own.said.index(max(scores[lane], key=scores[lane].__getitem__))
                step, score = own.steps[at], scores[lane][own.said[at]]
                parts = (step.text, [*step.tokens], "error" if math.isnan(score) else own.ends[at], passes)
            else:
                parts = (new_text(model.tokenizer, second[lane], said[lane]), said[lane], judge.reason(lane), passes)
                score = None
            found.append(Written(own.prompt, *parts, steps=own.steps, score=score))
        return found

    def _asked(self, judge, asked, chains):
        """The second prompts, and which of them leave room for a reply if one is needed; rows that reply have read them."""
        model, count = judge.model, len(chains)
        second = [encoded(model, self.question(own.prompt, [step.text or "" for step in own.steps])) for own in chains]
        known = [max(1, len(os.path.commonprefix([own.ids, ids]))) for own, ids in zip(chains, second, strict=True)]
        longest = asked.max_new_tokens + len(words_of(model, self._replied("")))
        alone = [len(own.answers) == 1 for own in chains]
        fits = [ok or len(ids) + longest <= judge.longest for ids, ok in zip(second, alone, strict=True)]
        judge.passes[:], judge.failed[:], judge.most[:] = 0, False, 0
        judge.back(np.asarray(known + [1] * (judge.rows - count)))
        reads = [ok and not one for ok, one in zip(fits, alone, strict=True)]
        rest = [list(ids[at:]) if own else [] for ids, at, own in zip(second, known, reads, strict=True)]
        judge.read([*rest, *[[]] * (judge.rows - count)])
        return second, fits

    def _scores(self, judge, answers):
        """By row, the log-probability of the reply with each answer; 0 for a single one."""
        replies = [
            [words_of(judge.model, self._replied(one)) for one in own] if len(own) > 1 else [] for own in answers
        ]
        scores = reply_scores(judge, replies)
        return [
            dict(zip(own, said or [0.0] * len(own), strict=True)) for own, said in zip(answers, scores, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Chains:
    """The completions of a prompt.

    Attributes:
      prompt: as given.
      ids: its token ids.
      steps: the completions.
      ends: why each ended.
      said: the answer of each; None of none.
    """

    prompt: Any
    ids: tuple[int, ...]
    steps: tuple[Step, ...]
    ends: list[str]
    said: list[str | None]

    @property
    def answers(self) -> list[str]:
        """The different answers, in their order."""
        return [own for own in dict.fromkeys(self.said) if own is not None]
