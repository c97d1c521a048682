"""Completions of prompts, drawn side by side in rows of one model, and the model's scores of replies about them.

In the shape descriptions `B` denotes rows.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models.messages import content_text
from specjax.models.text import new_text
from specjax.search.stepwise import Asked, Step
from specjax.search.writer import WIDTHS, Writer
from specjax.sharding.distributed import to_host

SPARE = 32
"""How many tokens longer completions may be when read than when written, each and all together."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A completion.

    Attributes:
      step: its tokens and its text.
      end: why it ended, as in `Written.finish_reason`.
      certainty: its self-certainty in nats (`specjax.state.LogProbs`); None if it was not kept.
    """

    step: Step
    end: str
    certainty: float | None = None

    @property
    def text(self) -> str:
        """Its text, "" without one."""
        return self.step.text or ""


class Pool:
    """Draws several completions of each prompt, which is read once.

    Args:
      model: a `specjax.models.Model`.
      lanes: prompts side by side.
      samples: completions of each.
      asked: all prompts that will come; each has keys for its completions.
      hedged: whether the first completion of each prompt is greedy.
      room: tokens that a row may hold beyond its prompt and its new tokens.
      certainty: whether completions have their self-certainty.

    Attributes:
      prompts: after a `draw`, the state of `lanes` rows that have read a prompt each, see `Writer.fork`.
    """

    def __init__(
        self, model: Any, lanes: int, samples: int, asked: Asked, *, hedged: bool = False, room: int = 0,
        certainty: bool = False,
    ):  # fmt: skip
        self.lanes, self.samples, self.certainty = lanes, samples, certainty
        self.writer = Writer(model, lanes * samples, asked, (), room=room, logprobs=certainty)
        self.prompts: Any = None
        self.hedge: Asked | None = None
        if hedged:
            heats = np.full(self.writer.rows, asked.sampling.get("temperature") or 0.0, np.float32)
            heats[::samples] = 0.0
            self.hedge = dataclasses.replace(asked, sampling={**asked.sampling, "temperature": heats})

    def draw(self, asked: Asked) -> list[list[Drawn]]:
        """The completions of each of these prompts, of which there are `lanes` at most.

        With the keys of `specjax.generate` they are those that it draws at this seed (`num_return_sequences`), except a
        first one that is greedy.
        """
        writer, samples, lanes, count = self.writer, self.samples, self.lanes, len(asked.ids)
        writer.enter(dataclasses.replace(asked, keys=asked.keys.reshape(count, -1, 2)[:, 0]))
        places = [row if row < count else lanes for row in range(writer.rows)]
        self.prompts = writer.keep(writer.blank(lanes), places)
        lane_of = np.arange(writer.rows) // samples
        keys = np.zeros((writer.rows, 2), np.uint32)
        keys[: count * samples] = asked.keys.reshape(-1, 2)
        most = np.append(writer.most[:count], np.zeros(lanes - count, np.int64))
        writer.fork(self.prompts, lane_of, keys)
        writer.most[:] = most[lane_of]
        if self.hedge is not None:
            writer.state = dataclasses.replace(writer.state, sampling=self.hedge.sampling_of(writer.rows))
        tokens = writer.write(lane_of < count, asked.max_new_tokens, step=False)
        sure = to_host(writer.state.logprobs.certainty) if self.certainty else None
        found: list[list[Drawn]] = []
        for lane, ids in enumerate(asked.ids):
            rows = range(lane * samples, (lane + 1) * samples)
            found.append([self._drawn(row, ids, tokens[row], sure) for row in rows])
        return found

    def _drawn(self, row: int, ids: Sequence[int], tokens: list[int], sure: Any) -> Drawn:
        """What a row holds."""
        writer = self.writer
        text = new_text(writer.model.tokenizer, ids, tokens) or ""
        own = None if sure is None else sure[row, int(writer.begin[row]) : int(writer.length[row])]
        mean = None if own is None else float(np.mean(own)) if len(own) else 0.0
        return Drawn(Step(tuple(tokens), text), writer.reason(row), mean)


def passes_of(drawn: Sequence[Drawn]) -> int:
    """The passes over rows that completions took: one for each token."""
    return sum(len(own.step.tokens) for own in drawn)


def blocks(ids: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> np.ndarray:
    """`[N]`: the passes that count for reading prompts which go on from known ones: one for up to 64 tokens more."""
    more = [max(0, len(own) - len(old)) for own, old in zip(ids, known, strict=True)]
    return np.asarray([-(-own // WIDTHS[-1]) for own in more], np.int64)


def reply_scores(writer: Writer, replies: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
    """By row, the model's log-probability of each of its replies after the row's text, which stays as it is.

    Args:
      writer: the rows. They need room for the longest reply.
      replies: for the first rows, the token ids of each reply; none in rows about which nothing is asked.
    """
    found: list[list[float]] = [[] for _ in replies]
    begin, none = writer.length.copy(), [()] * (writer.rows - len(replies))
    for at in range(max(map(len, replies), default=0)):
        heard = writer.read([*[own[at] if at < len(own) else () for own in replies], *none])
        for row, own in enumerate(replies):
            if at < len(own):
                found[row].append(math.fsum(heard.logprobs[row]))
        writer.back(begin)
    return found


def asked_in_words(
    model: Any, prompts: Sequence[Any], most: int, seed: int, sampling: dict[str, Any], keys: np.ndarray | None, draws: int,
    samples: int,
) -> Asked:  # fmt: skip
    """What is asked by a method that puts completions, of which it draws several, after their prompts' words.

    Args:
      model: see `Asked.of`, as the next five.
      prompts: texts or chats.
      most: the most tokens of a completion.
      seed: determines the noise, together with a prompt.
      sampling: of the completions.
      keys: see `Asked.of`.
      draws: keys of each prompt.
      samples: completions that are to differ.

    Raises:
      ValueError: see `Asked.of`; also for several greedy completions, and prompts of ids.
    """
    check_drawn(samples, sampling)
    asked = Asked.of([model], prompts, most, seed, sampling, keys, draws)
    for prompt in asked.prompts:
        check_chat(prompt)
    return asked


def check_chat(prompt: Any) -> None:
    """Raises ValueError for a prompt that cannot go on in words: token ids, or a chat that ends with the assistant's turn."""
    if isinstance(prompt, str):
        return
    if not len(prompt) or not isinstance(prompt[-1], Mapping):
        raise ValueError("a second prompt is written with the first one's words: give texts or chats, not ids")
    if prompt[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, and a question follows it: end with the user's")


def going_on(prompt: Any, more: str) -> Any:
    """A prompt with more words at its end: a text, or chat messages of which the last one continues."""
    if isinstance(prompt, str):
        return prompt + more
    return [*prompt[:-1], {**prompt[-1], "content": content_text(prompt[-1]) + more}]


def check_place(name: str, text: str, place: str, **others: Any) -> None:
    """Raises ValueError if a template lacks its place, or has one besides it and the `others`."""
    try:
        there = text.format(**{place: "0"}, **others) != text.format(**{place: ""}, **others)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{name} has {{{place}}} as its place and no other one, got {text!r}") from error
    if not there:
        raise ValueError(f"{name} must hold {{{place}}}, got {text!r}")


def check_drawn(samples: int, sampling: Mapping[str, Any]) -> None:
    """Raises ValueError if several completions are asked for and none of them is drawn."""
    if samples > 1 and not sampling.get("temperature"):
        raise ValueError("completions of a greedy prompt are all the same: set a temperature, or samples to 1")


def check_fits(model: Any, room: int, samples: int, most: int) -> None:
    """Raises ValueError if a second prompt might not fit.

    Args:
      model: that reads it.
      room: the positions that it may take, with what is written after it.
      samples: completions.
      most: tokens of a completion.
    """
    if room > model.max_length:
        raise ValueError(
            f"{samples} completions of {most} tokens, the prompt and an answer may take {room} positions, and {model.name} has "
            f"{model.max_length}: lower samples or max_new_tokens"
        )
