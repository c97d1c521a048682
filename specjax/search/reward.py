"""Best of N by a scorer of the user's (Cobbe et al. 2021), one number for each completion or one for each of its steps."""

import dataclasses
import functools
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.search.selection import Selection, by_answer

Scorer = Callable[[str, list[str]], Sequence[Any]]
"""From a prompt and its completions to a number for each, or to a list of numbers for each, one per step."""

AGGREGATES = {"mean": np.mean, "min": np.min, "last": lambda steps: steps[-1], "product": np.prod}
VOTES = ("best", "sum")


class ScorerError(ValueError):
    """A scorer failed, or returned something else than numbers."""


@dataclasses.dataclass(frozen=True)
class Reward(Selection):
    """A completion is worth what a function of the user's says; on a tie the first is taken.

    The function is called once per prompt, as `f(prompt, texts)`. `prompt` is the text as given; of a chat, the texts of
    its messages with an empty line between them. `texts` are the completions that have an answer, in their order. It
    returns a finite number for each of them, or a list of finite numbers, one for each step that it finds in the text.

    Attributes:
      module: the function's name with its modules, such as `"pkg.module.function"`; it may lie in the working directory.
        In Python also the function itself.
      aggregate: the worth of a text with numbers for steps: their `mean` (as SPARE's released code, arXiv:2506.15498),
        `min`, `product`, or the `last`.
      vote: `best` takes the completion that is worth the most; `sum` the first with the answer whose completions are
        worth the most together (arXiv:2206.02336).

    Raises:
      ValueError: for an unknown `aggregate` or `vote`.
    """

    about = About(
        "reward", "the completion that a function of yours scores highest", "arXiv:2110.14168", "own text",
        fields=("module", "aggregate", "vote", "answer"),
    )  # fmt: skip
    reads_text = True

    module: str | Scorer = ""
    aggregate: str = "mean"
    vote: str = "best"

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("aggregate", (*AGGREGATES,)), ("vote", VOTES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} of reward is one of {', '.join(known)}, not {getattr(self, name)!r}")

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The function.

        Raises:
          ScorerError: if there is none of that name.
        """
        return function_of(self.module) if isinstance(self.module, str) else self.module

    @property
    def called(self) -> str:
        """The function's name, for errors."""
        return self.module if isinstance(self.module, str) else getattr(self.module, "__name__", repr(self.module))

    def ready(self):
        if not callable(self.scorer):
            raise ScorerError(f"reward: {self.called} is no function, and a scorer is called with a prompt and texts")
        return self

    def scores(self, candidates):
        asked = [index for index, one in enumerate(candidates) if one.answer is not None]
        worth = [-math.inf] * len(candidates)
        if asked:
            found = self._worth(candidates[asked[0]].prompt, [candidates[index].text for index in asked])
            for index, own in zip(asked, found, strict=True):
                worth[index] = own
        return by_answer(candidates, worth) if self.vote == "sum" else worth

    def _worth(self, prompt: str, texts: list[str]) -> list[float]:
        """What each text is worth.

        Raises:
          ScorerError: if the function fails, or does not return finite numbers for each.
        """
        try:
            found = list(self.scorer(prompt, list(texts)))
        except Exception as error:  # whatever the user's code raises
            raise ScorerError(f"the scorer {self.called} failed: {type(error).__name__}: {error}") from error
        if len(found) != len(texts):
            raise ScorerError(
                f"the scorer {self.called} must return a number for each text: {len(found)} for {len(texts)}"
            )
        return [self._number(index, own) for index, own in enumerate(found)]

    def _number(self, index: int, found: Any) -> float:
        try:
            steps = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            steps = np.full(1, np.nan)
        if steps.ndim > 1 or not steps.size or not np.isfinite(steps).all():
            raise ScorerError(
                f"the scorer {self.called} must return a finite number for each text, or a list of them: text {index + 1} "
                f"has {found!r:.60}"
            )
        return float(AGGREGATES[self.aggregate](steps) if steps.ndim else steps)


def function_of(name: str, field: str = "reward") -> Scorer:
    """The object of a dotted name, looked for in the working directory last; `field` is what the error calls it.

    Raises:
      ScorerError: if a module cannot be imported, or has nothing of that name.
    """
    if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
        needs = "a scorer, as in reward:module=" if field == "reward" else f"a function, as in {field}="
        raise ScorerError(f"{field} needs {needs}pkg.function, got {name!r}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # a user's module may raise anything
        raise ScorerError(f"{field} cannot read {name}: {type(error).__name__}: {error}") from error
