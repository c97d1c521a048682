"""PlanSearch as a way to decode: a model is asked, and a function of the user's says which program is the best."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.messages import content_text
from specjax.models.text import encoded, new_text
from specjax.search.plan_search.plans import Messages, programs
from specjax.search.reward import ScorerError, function_of
from specjax.search.stepwise import Asked, Step, Stepwise, Written, words_of
from specjax.search.writer import Writer

Check = Callable[[str, str], float]
"""From a problem and a program to how good the program is, such as the share of public tests that it passes."""


@dataclasses.dataclass(frozen=True, repr=False)
class Planned(Written):
    """A program that was found by searching over plans.

    Attributes:
      calls: replies that the model was asked for.
      lost: those that it could not give, since the chat has no room left in the model's positions.
    """

    calls: int = 0
    lost: int = 0


@dataclasses.dataclass(frozen=True)
class PlanSearch(Stepwise):
    """Writes programs from plans that begin with different observations about a problem, and takes the best one.

    The model names observations, and new ones that follow from each subset of these. Every distinct subset gives a solution
    in plain words and, after a critique, a corrected one. Each of these gives pseudo-code and a program.

    Nothing is executed. If `check` is given, it is called with the problem and each program, and the best one is the text;
    what it runs, and where, is up to it. Otherwise the text is the first program in random order.

    The words of all questions are this library's. With the authors' 10 observations, pairs and two layers a problem takes
    thousands of replies.

    Attributes:
      observations: how many are asked for at first.
      subset: the size of the largest subset.
      layers: how often observations are asked for; 0 writes programs without any.
      check: the name of a function `f(problem, program)` with its modules, or the function; it returns a number, the higher
        the better. Empty: no program is checked.
      programs: how many programs may be checked, in random order; None: all.

    Raises:
      ValueError: for numbers out of range.
    """

    about = About(
        "plan_search", "programs from plans with different observations; a function of yours checks them",
        "arXiv:2409.03733", "own text", fields=("observations", "subset", "layers", "check", "programs"),
    )  # fmt: skip
    usual = MappingProxyType({"temperature": 0.9, "top_p": 0.95})

    observations: int = 10
    subset: int = 2
    layers: int = 2
    check: str | Check = ""
    programs: int | None = None

    def __post_init__(self):
        for name, least in (("observations", 1), ("subset", 0), ("layers", 0), ("programs", 1)):
            value = getattr(self, name)
            if name == "programs" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Stepwise, Any]:
        """See `Decode.bind`; looks for the function."""
        check = function_of(self.check, "check") if isinstance(self.check, str) and self.check else self.check
        if check != "" and not callable(check):
            raise ScorerError(f"check must be a function of a problem and a program, got {check!r:.60}")
        bound, params = super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)
        return dataclasses.replace(bound, check=check), params  # type: ignore[type-var]

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 4096,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Planned]:
        """A program for every problem, in order; `steps` are the programs that were checked, and `score` is the check's.

        Args:
          model: from `specjax.load`; one that chats.
          prompts: a list of texts, or of chats whose last message is the problem.
          max_new_tokens: the most tokens of each reply.
          seed: determines the noise, together with a prompt.
          batch_size: replies that are written side by side.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`; without a temperature, 0.9 and a `top_p` of 0.95.

        Raises:
          ValueError: see `Asked.of`; also for prompts of ids and a model that does not chat. `ScorerError` for a check that
            fails, or returns no number.
        """
        own: Any = self.bind(model)[0]
        options = self.published(sampling)
        asked = Asked.of([model], prompts, max_new_tokens, seed, options, keys)
        asked.parts(batch_size)
        problems = [_problem(prompt) for prompt in asked.prompts]
        for problem in problems:
            encoded(model, [{"role": "user", "content": problem}])
        return [
            own._found(problem, _Asker(model, asked.keys[number], max_new_tokens, batch_size, options), prompt)
            for number, (problem, prompt) in enumerate(zip(problems, asked.prompts, strict=True))
        ]

    def _found(self, problem: str, asker: "_Asker", prompt: Any) -> Planned:
        """The program for a problem."""
        rng = np.random.default_rng(asker.key)
        sizes = {"observations": self.observations, "subset": self.subset, "layers": self.layers}
        every = [own for own in programs(problem, asker.ask, rng, **sizes) if own.code]
        steps = [
            Step(words_of(asker.model, own.code), own.code, score=self._worth(problem, own.code))
            for own in every[: self.programs]
        ]
        told = {"passes": asker.passes, "steps": tuple(steps), "calls": asker.calls, "lost": asker.lost}
        if not steps:
            said = f"the model wrote no program in {asker.calls} replies, {asker.lost} of which had no room"
            return Planned(prompt, None, [], "error", error=said, **told)
        best = max(steps, key=lambda step: step.score or 0.0) if self.check else steps[0]
        return Planned(prompt, best.text, list(best.tokens), "stop", score=best.score, **told)

    def _worth(self, problem: str, program: str) -> float | None:
        """What the check says of a program.

        Raises:
          ScorerError: if it fails, or returns no finite number.
        """
        if isinstance(self.check, str):
            return None
        try:
            worth = float(self.check(problem, program))
        except Exception as error:  # whatever the user's code raises
            raise ScorerError(f"the check of plan_search failed: {type(error).__name__}: {error}") from error
        if not math.isfinite(worth):
            raise ScorerError(f"the check of plan_search must return a finite number, got {worth!r}")
        return worth


class _Asker:
    """Asks a model in chats, some side by side."""

    def __init__(self, model: Any, key: np.ndarray, most: int, rows: int, sampling: Mapping[str, Any]):
        self.model, self.key, self.most, self.rows, self.sampling = model, key, most, rows, sampling
        self.calls = self.lost = self.passes = 0

    def ask(self, chats: list[Messages], temperature: float | None) -> list[str]:
        """See `specjax.search.plan_search.plans.Ask`. Every reply has a key of its own."""
        own = self.sampling if temperature is None else {**self.sampling, "temperature": temperature}
        numbers = [(*self.key.tolist(), self.calls + at) for at in range(len(chats))]
        keys = np.stack([np.random.default_rng(number).integers(0, 2**32, 2, np.uint32) for number in numbers])
        self.calls += len(chats)
        replies, fits = [""] * len(chats), []
        for at, chat in enumerate(chats):
            try:
                encoded(self.model, chat)
                fits.append(at)
            except ValueError:
                self.lost += 1
        for begin in range(0, len(fits), self.rows):
            part = fits[begin : begin + self.rows]
            found = self._written([chats[at] for at in part], keys[part], own)
            for at, reply in zip(part, found, strict=True):
                replies[at] = reply
        return replies

    def _written(self, chats: list[Messages], keys: np.ndarray, sampling: Mapping[str, Any]) -> list[str]:
        """The replies in one batch."""
        asked = Asked.of([self.model], chats, self.most, 0, dict(sampling), keys)
        writer = Writer(self.model, self.rows, asked, ())
        writer.enter(asked)
        tokens = writer.write(np.arange(self.rows) < len(chats), self.most, step=False)
        self.passes += int(writer.passes[: len(chats)].sum())
        pairs = zip(asked.ids, tokens, strict=False)
        return [new_text(self.model.tokenizer, ids, own) or "" for ids, own in pairs]


def _problem(prompt: Any) -> str:
    """The text of a problem.

    Raises:
      ValueError: for token ids.
    """
    if isinstance(prompt, str):
        return prompt
    if not len(prompt) or not isinstance(prompt[-1], Mapping):
        raise ValueError("questions about a problem are written with its words: give texts or chats, not ids")
    return str(content_text(prompt[-1]))
