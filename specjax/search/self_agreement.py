"""Self-agreement (arXiv:2311.08154): draws several completions, then asks the model which answer most of them give."""

import dataclasses
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.messages import content_text
from specjax.models.text import encoded, new_text
from specjax.sampling_params import SamplingArrays
from specjax.search.stepwise import Asked, Step, Stepwise, Written
from specjax.search.writer import Writer

SPARE = 32
"""How many tokens longer completions may be when read than when written, each and all together."""


@dataclasses.dataclass(frozen=True)
class SelfAgreement(Stepwise):
    """Draws completions of a prompt, puts them after it, and asks for the answer that most of them give, greedily.

    The completions are those that `specjax.generate` draws at this seed (`num_return_sequences`). The prompt is read
    once, for all of them and for the common beginning of the two prompts. All completions must fit into the model's
    positions beside the prompt.

    Attributes:
      samples: completions.
      before: the text between the prompt and the completions.
      each: the text of a completion; `{number}` counts from 1.
      after: the question after them.

    Raises:
      ValueError: for fewer than one completion, or if there is no place for a completion.
    """

    about = About(
        "self_agreement", "asks the model for the answer of most of its completions", "arXiv:2311.08154", "own text",
    )  # fmt: skip

    samples: int = 8
    before: str = "\n\nSeveral answers to this were given:\n"
    each: str = "{number}. {answer}\n"
    after: str = "Which final answer do most of them agree on? Say that answer."

    def __post_init__(self):
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be a whole number from 1 on, got {self.samples!r}")
        if "{answer}" not in self.each:
            raise ValueError(f"each must hold {{answer}}, the place of a completion, got {self.each!r}")

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
        """For every prompt in order, the answer that most of its completions agree on, in the model's words.

        `steps` are the completions.

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
        room = frame + self.samples * (max_new_tokens + SPARE)
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
        chains = [drawn[lane * samples : (lane + 1) * samples] for lane in range(count)]
        return self._judged(judge, asked, chains)

    def _judged(self, judge, asked, chains):
        """The final answers, from the completions `chains` of every prompt."""
        model, count = judge.model, len(asked.ids)
        texts = [
            [new_text(model.tokenizer, ids, own) or "" for own in lane]
            for lane, ids in zip(chains, asked.ids, strict=True)
        ]
        second = [encoded(model, self.question(*pair)) for pair in zip(asked.prompts, texts, strict=True)]
        known = [len(os.path.commonprefix([a, b])) for a, b in zip(asked.ids, second, strict=True)]
        known = [max(1, own) for own in known]
        fits = [len(own) + asked.max_new_tokens <= model.max_length for own in second]
        judge.passes[:], judge.failed[:], judge.most[:] = 0, False, 0
        judge.back(np.asarray(known + [1] * (judge.rows - count)))
        rest = [list(own[at:]) if ok else [] for own, at, ok in zip(second, known, fits, strict=True)]
        judge.read([*rest, *[[]] * (judge.rows - count)])
        judge.begin = judge.length.copy()
        judge.most[:count] = judge.length[:count] + np.where(fits, asked.max_new_tokens, 0)
        said = judge.write(np.arange(judge.rows) < count, asked.max_new_tokens, step=False)
        found = []
        for lane in range(count):
            passes = sum(map(len, chains[lane])) + int(judge.passes[lane])
            text = new_text(model.tokenizer, second[lane], said[lane])
            steps = tuple(Step(tuple(own), words) for own, words in zip(chains[lane], texts[lane], strict=True))
            found.append(Written(asked.prompts[lane], text, said[lane], judge.reason(lane), passes, steps=steps))
        return found
