"""Self-agreement (arXiv:2311.08154): draws several completions, then asks the model which answer most of them give."""

import dataclasses
import math
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.messages import content_text
from specjax.models.text import encoded, new_text
from specjax.sampling_params import SamplingArrays
from specjax.search.selection import answer_of
from specjax.search.stepwise import Asked, Step, Stepwise, Written, words_of
from specjax.search.writer import Writer

ANSWER = r"(?:answer is:?|\\boxed\{)[\s*$\\({]*(?:boxed\{)?(-?\d+(?:,\d{3})*(?:\.\d+)?|[^\s.*$}][^\n.*$}]*)"
"""The number, or else the words up to the next full stop or line, after "answer is" or within a box."""
SPARE = 32
"""How many tokens longer completions may be when read than when written, each and all together."""


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
        more = f"{self.before}{listed}{self.after}"
        if isinstance(prompt, str):
            return prompt + more
        return [*prompt[:-1], {**prompt[-1], "content": content_text(prompt[-1]) + more}]

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
        if self.samples > 1 and not sampling.get("temperature"):
            raise ValueError("completions of a greedy prompt are all the same: set a temperature, or samples to 1")
        asked = Asked.of([model], prompts, max_new_tokens, seed, sampling, keys, self.draws)
        for prompt in asked.prompts:
            if not isinstance(prompt, str) and not (len(prompt) and isinstance(prompt[-1], Mapping)):
                raise ValueError("a second prompt is written with the first one's words: give texts or chats, not ids")
            if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
                raise ValueError("the last message is the assistant's, and a question follows it: end with the user's")
        parts = asked.parts(batch_size)
        if not parts:
            return []
        frame = max(len(encoded(model, self.question(prompt, [""] * self.samples))) for prompt in asked.prompts)
        room = frame + self.samples * (max_new_tokens + SPARE) + len(words_of(model, self._replied("")))
        if room + max_new_tokens > model.max_length:
            raise ValueError(
                f"{self.samples} completions of {max_new_tokens} tokens, the prompt and an answer may take "
                f"{room + max_new_tokens} positions, and {model.name} has {model.max_length}: lower samples or max_new_tokens"
            )
        lanes = len(parts[0].ids)
        greedy = dataclasses.replace(asked, sampling={})
        writer = Writer(model, lanes * self.samples, asked, (), room=room)
        judge = Writer(model, lanes, greedy, (), room=room)
        return [found for part in parts for found in self._part(writer, judge, part)]

    def _part(self, writer: Writer, judge: Writer, asked: Asked) -> list[Written]:
        """Some prompts side by side."""
        count, samples, lanes = len(asked.ids), self.samples, judge.rows
        writer.enter(dataclasses.replace(asked, keys=asked.keys.reshape(count, -1, 2)[:, 0]))
        pool = writer.keep(writer.blank(lanes), [row if row < count else lanes for row in range(writer.rows)])
        lane_of = np.arange(writer.rows) // samples
        keys = np.zeros((writer.rows, 2), np.uint32)
        keys[: count * samples] = asked.keys.reshape(-1, 2)
        most = np.append(writer.most[:count], np.zeros(lanes - count, np.int64))
        writer.fork(pool, lane_of, keys)
        writer.most[:] = most[lane_of]
        drawn = writer.write(lane_of < count, asked.max_new_tokens, step=False)
        judge.fork(pool, np.arange(lanes), np.zeros((lanes, 2), np.uint32))
        judge.state = dataclasses.replace(judge.state, sampling=SamplingArrays.make(lanes))
        ends = [writer.reason(row) for row in range(count * samples)]
        found = []
        for lane, (prompt, ids) in enumerate(zip(asked.prompts, asked.ids, strict=True)):
            rows = range(lane * samples, (lane + 1) * samples)
            texts = [new_text(judge.model.tokenizer, ids, drawn[row]) or "" for row in rows]
            steps = tuple(Step(tuple(drawn[row]), text) for row, text in zip(rows, texts, strict=True))
            own = [ends[row] for row in rows]
            said = [self._said(*pair) for pair in zip(texts, own, strict=True)]
            found.append(_Chains(prompt, ids, steps, own, said))
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
        fits = [ok or len(ids) + longest <= model.max_length for ids, ok in zip(second, alone, strict=True)]
        judge.passes[:], judge.failed[:], judge.most[:] = 0, False, 0
        judge.back(np.asarray(known + [1] * (judge.rows - count)))
        reads = [ok and not one for ok, one in zip(fits, alone, strict=True)]
        rest = [list(ids[at:]) if own else [] for ids, at, own in zip(second, known, reads, strict=True)]
        judge.read([*rest, *[[]] * (judge.rows - count)])
        return second, fits

    def _scores(self, judge, answers):
        """By row, the log-probability of the reply with each answer; 0 for a single one."""
        scores = [dict.fromkeys(own, 0.0) for own in answers]
        begin, none = judge.length.copy(), [()] * (judge.rows - len(answers))
        for at in range(max(map(len, answers), default=0)):
            asked = [own[at] if len(own) > 1 and at < len(own) else None for own in answers]
            texts = [() if own is None else words_of(judge.model, self._replied(own)) for own in asked]
            if not any(texts):
                continue
            heard = judge.read([*texts, *none])
            for row, own in enumerate(asked):
                if own is not None:
                    scores[row][own] = math.fsum(heard.logprobs[row])
            judge.back(begin)
        return scores


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
