"""Verbalized sampling (arXiv:2510.01171): the model lists answers with their probabilities, and one of them is drawn."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.messages import content_text
from specjax.models.text import encoded, new_text
from specjax.search.stepwise import Asked, Step, Stepwise, Written, keys_of_prompts, words_of
from specjax.search.writer import Writer

INSTRUCTION = (
    'Give {answers} different answers to what is asked. Write one JSON object and nothing else. Its key "responses" '
    'holds a list of objects, each with "text", the answer alone, and "probability", a number from 0 to 1 that says '
    "how likely you are to give this answer."
)


@dataclasses.dataclass(frozen=True)
class Verbalized(Stepwise):
    """Asks for several answers with their probabilities in one reply, and draws one of them by these.

    The text is the drawn answer, and `score` its stated probability. Negative probabilities count as 0. If no answer has
    a positive one, all are equally likely. A reply without answers is an error of that prompt.

    Attributes:
      answers: how many answers the model is asked for.
      instruction: the request, with the place `{answers}`: a chat's system turn, or the beginning of another prompt.

    Raises:
      ValueError: for fewer than one answer, or an instruction without their place.
    """

    about = About(
        "verbalized", "the model lists answers with their probabilities; one is drawn by them", "arXiv:2510.01171",
        "own text",
    )  # fmt: skip
    usual = {"temperature": 0.7}

    answers: int = 5
    instruction: str = INSTRUCTION

    def __post_init__(self):
        if not isinstance(self.answers, int) or self.answers < 1:
            raise ValueError(f"answers must be a whole number from 1 on, got {self.answers!r}")
        if "{answers}" not in self.instruction:
            raise ValueError(f"instruction must hold {{answers}}, the place of their number, got {self.instruction!r}")

    def question(self, prompt: Any) -> Any:
        """The prompt with the instruction.

        Raises:
          ValueError: for token ids.
        """
        asks = self.instruction.replace("{answers}", str(self.answers))
        if isinstance(prompt, str):
            return f"{asks}\n\n{prompt}"
        if not len(prompt) or not isinstance(prompt[0], Mapping):
            raise ValueError("the instruction is written with the prompt's words: give texts or chats, not ids")
        if prompt[0]["role"] != "system":
            return [{"role": "system", "content": asks}, *prompt]
        return [{**prompt[0], "content": f"{content_text(prompt[0])}\n\n{asks}"}, *prompt[1:]]

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 512,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Written]:
        """For every prompt in order, the answer that was drawn; `steps` are all answers, with their probabilities.

        Args:
          model: from `specjax.models.load`.
          prompts: a list of texts or chats.
          max_new_tokens: the most tokens of a reply, which lists all answers.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side.
          keys: see `Asked.of`; a prompt's key also draws its answer.
          **sampling: as in `specjax.generate`, for the reply; without a temperature, 0.7.

        Raises:
          ValueError: see `Asked.of`; also for prompts of ids.
        """
        questions = prompts if isinstance(prompts, str) else [self.question(prompt) for prompt in prompts]
        if keys is None and questions is not prompts:  # those of the prompts as given, as in `generate`
            keys = keys_of_prompts([seed] * len(prompts), [encoded(model, prompt) for prompt in prompts], 1)
        asked = Asked.of([model], questions, max_new_tokens, seed, self.published(sampling), keys)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        found: list[Written] = []
        writer = Writer(model, len(parts[0].ids), asked, ())
        for part in parts:
            writer.enter(part)
            count = len(part.ids)
            replies = writer.write(np.arange(writer.rows) < count, max_new_tokens, step=False)
            for row, ids in enumerate(part.ids):
                reply = new_text(model.tokenizer, ids, replies[row]) or ""
                whole = Written(prompts[len(found)], reply, replies[row], writer.reason(row), int(writer.passes[row]))
                found.append(whole if writer.failed[row] else _chosen(model, whole, part.keys[row]))
        return found


def _chosen(model: Any, reply: Written, key: np.ndarray) -> Written:
    """The answer drawn from a reply."""
    answers = answers_of(reply.text or "")
    if not answers:
        said = f'the reply of {model.name} is no JSON object with answers under "responses": {reply.text!r:.60}'
        return dataclasses.replace(reply, finish_reason="error", error=said)
    steps = tuple(Step(words_of(model, text), text, score=chance) for text, chance in answers)
    weights = weights_of([chance for _, chance in answers])
    taken = steps[int(np.random.default_rng(key).choice(len(steps), p=weights))]
    reply = dataclasses.replace(reply, text=taken.text, tokens=list(taken.tokens), finish_reason="stop")
    return dataclasses.replace(reply, steps=steps, score=taken.score)


def weights_of(chances: Sequence[float | None]) -> np.ndarray:
    """The probabilities `[N]` with which answers are drawn.

    >>> weights_of([0.5, 0.25, None, -1.0]).round(3).tolist(), weights_of([None, 0.0]).tolist()
    ([0.667, 0.333, 0.0, 0.0], [0.5, 0.5])
    """
    weights = np.maximum(np.asarray([0.0 if chance is None else chance for chance in chances], np.float64), 0.0)
    return weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))


def answers_of(reply: str) -> list[tuple[str, float | None]]:
    """The answers in a reply and their probabilities, None where there is no number; empty if it has none.

    A code fence around the object, text around its braces, and commas before closing brackets are passed over.

    >>> answers_of('Here: {"responses": [{"text": "a", "probability": 0.5}, {"response": "b"},]}')
    [('a', 0.5), ('b', None)]
    """
    try:
        listed = json.loads(_object_in(reply))["responses"]
    except (ValueError, KeyError, TypeError):
        return []
    found = [_answer(own) for own in listed] if isinstance(listed, list) else []
    return [own for own in found if own is not None]


def _object_in(reply: str) -> str:
    """The text of the JSON object in a reply."""
    if "```json" in reply:
        inside, fence, _ = reply.partition("```json")[2].partition("```")
        reply = inside if fence else reply
    elif reply.count("```") > 1:
        reply = reply[reply.index("```") + 3 : reply.rindex("```")]
    begin, end = reply.find("{"), reply.rfind("}")
    whole = reply[begin : end + 1] if begin >= 0 and end >= 0 else reply
    return re.sub(r",\s*([}\]])", r"\1", whole)


def _answer(own: Any) -> tuple[str, float | None] | None:
    """An entry's text and probability; None if it has no text."""
    if isinstance(own, str):
        return own, None
    text = own.get("response", own.get("text")) if isinstance(own, dict) else None
    if not isinstance(text, str):
        return None
    chance = own.get("probability")
    is_number = isinstance(chance, (int, float)) and not isinstance(chance, bool) and math.isfinite(chance)
    return text, float(chance) if is_number else None
