"""Cross-lingual MBR (arXiv:2506.20544): the completion that is most like all others, also those in other languages."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.models.text import encoded
from specjax.search.means import hidden_means
from specjax.search.pool import Drawn, Pool, asked_in_words, blocks, check_place, going_on, passes_of
from specjax.search.reward import ScorerError, function_of
from specjax.search.selection import answer_of, prompt_text
from specjax.search.stepwise import Asked, Stepwise, Written, words_of

Utility = Callable[[str, str, list[str]], Sequence[float]]
"""From a prompt, a completion and the evidence, to how much the completion agrees with each piece of it."""
UTILITIES = ("hidden", "answer")
ROWS = 8
"""How many texts are read side by side."""


@dataclasses.dataclass(frozen=True)
class XMbr(Stepwise):
    """Minimum Bayes risk over several completions, with completions in other languages as further evidence.

    The text is the completion with the highest mean utility over all evidence: its own pool, itself included, and what the
    model writes where it is asked for the other languages. On a tie it is the first one. Without other languages this is
    plain MBR, and by the utility `answer` a majority.

    The completions are those that `specjax.generate` draws at this seed (`num_return_sequences`), except that the first one,
    here and in every language, is greedy if `hedged`. The paper's utility is a judge of several languages; `hidden`, and how
    many completions another language has, are this library's choices.

    Attributes:
      samples: completions; 1 is the greedy text, if `hedged`.
      hedged: whether the first one is greedy (hedged sampling).
      languages: the other languages by their names, with `|` between them; empty: none.
      foreign: completions in each of them.
      ask: the request for a language, after the prompt, with the place `{language}`.
      utility: `hidden`, the cosine of the model's mean hidden states over two texts; `answer`, 1 if both have the same answer
        and else 0; or the name of a function `f(prompt, text, evidence)` with its modules, or the function itself. It
        returns a number for each text of the evidence.
      answer: a regular expression that finds a completion's answer, as in `specjax.search.Selection`.

    Raises:
      ValueError: for counts that are too small, a request without its place, or a wrong regular expression.
    """

    about = About(
        "x_mbr", "the completion most like the others, also those in other languages", "arXiv:2506.20544", "own text",
        fields=("samples", "hedged", "languages", "foreign", "ask", "utility", "answer"),
    )  # fmt: skip

    samples: int = 5
    hedged: bool = True
    languages: str = "English"
    foreign: int = 5
    ask: str = "\n\nWrite the answer in {language}."
    utility: str | Utility = "hidden"
    answer: str = ""

    def __post_init__(self):
        for name in ("samples", "foreign"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        check_place("ask", self.ask, "language")
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(f"answer must be a regular expression, got {self.answer!r}: {error}") from error

    @property
    def _languages(self) -> list[str]:
        named = [own.strip() for own in self.languages.split("|") if own.strip()]
        return named if self.samples > 1 else []

    @property
    def draws(self) -> int:
        return self.samples + len(self._languages) * self.foreign

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Stepwise, Any]:
        """See `Decode.bind`; looks for the function."""
        found = self.utility
        if isinstance(found, str) and found not in UTILITIES:
            found = function_of(found, "utility")
        if not isinstance(found, str) and not callable(found):
            raise ScorerError(f"utility is {', '.join(UTILITIES)} or a function, got {found!r:.60}")
        bound, params = super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)
        return dataclasses.replace(bound, utility=found), params  # type: ignore[type-var]

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
        """For every prompt in order, the completion with the highest mean utility.

        `steps` are the completions with their mean utilities, then those in other languages, whose `by` is the language;
        `score` is the mean utility of the one that was taken.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts or chats.
          max_new_tokens: the most tokens of a completion.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side, with a row for each completion.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`, for the completions; several need a temperature.

        Raises:
          ValueError: see `Asked.of`; also for several greedy completions, or prompts of ids or without room for the request
            of a language. `ScorerError` for a function that fails, or does not return a number for each text.
        """
        own: Any = self.bind(model)[0]
        most = max(self.samples, self.foreign if self._languages else 1)
        asked = asked_in_words(model, prompts, max_new_tokens, seed, sampling, keys, self.draws, most)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        abroad = [own._abroad(model, asked, number) for number in range(len(self._languages))]
        lanes = len(parts[0].ids)
        pool = Pool(model, lanes, self.samples, own._home(asked), hedged=self.hedged)
        others = None
        if abroad:
            longest = max(abroad, key=lambda other: other.longest)
            others = Pool(model, lanes, self.foreign, longest, hedged=self.hedged)
        pieces = [other.parts(batch_size) for other in abroad]
        found: list[Written] = []
        for number, part in enumerate(parts):
            drawn = pool.draw(own._home(part))
            foreign = [others.draw(piece[number]) for piece in pieces] if others is not None else []
            for lane, prompt in enumerate(part.prompts):
                found.append(own._taken(model, prompt, drawn[lane], [every[lane] for every in foreign]))
        return found

    def _home(self, asked: Asked) -> Asked:
        """The prompts with the keys of their own completions."""
        keys = asked.keys.reshape(len(asked.ids), -1, 2)[:, : self.samples]
        return dataclasses.replace(asked, keys=keys)

    def _abroad(self, model: Any, asked: Asked, number: int) -> Asked:
        """The prompts with the request for a language, and the keys of these completions."""
        begin = self.samples + number * self.foreign
        more = self.ask.format(language=self._languages[number])
        prompts = tuple(going_on(prompt, more) for prompt in asked.prompts)
        ids = tuple(encoded(model, prompt) for prompt in prompts)
        return dataclasses.replace(asked, prompts=prompts, ids=ids, keys=asked.keys[:, begin : begin + self.foreign])

    def _taken(self, model: Any, prompt: Any, drawn: Sequence[Drawn], foreign: Sequence[Sequence[Drawn]]) -> Written:
        """The best completion of a prompt; one that failed is neither taken nor evidence."""
        whole = [at for at, one in enumerate(drawn) if one.end != "error"]
        texts = [drawn[at].text for at in whole]
        evidence = texts + [one.text for every in foreign for one in every if one.end != "error"]
        worth = [0.0 if at in whole else -math.inf for at in range(len(drawn))]
        read = 0
        if len(whole) > 1:
            table, read = self._utilities(model, prompt_text(prompt), texts, evidence)
            for at, row in zip(whole, table, strict=True):
                worth[at] = math.fsum(row) / len(row)
        best = max(range(len(drawn)), key=lambda at: (worth[at], -at))
        steps = [dataclasses.replace(one.step, score=own) for one, own in zip(drawn, worth, strict=True)]
        for language, every in zip(self._languages, foreign, strict=True):
            steps += [dataclasses.replace(one.step, by=language) for one in every]
        passes = passes_of(drawn) + sum(map(passes_of, foreign)) + read
        score = worth[best] if len(whole) > 1 else None
        taken = drawn[best]
        return Written(prompt, taken.text, list(taken.step.tokens), taken.end, passes, steps=tuple(steps), score=score)

    def _utilities(self, model, prompt, texts, evidence):
        """For every text its utility beside each piece of evidence, and the passes that this took."""
        if self.utility == "answer":
            said = [answer_of(text, self.answer or None) for text in evidence]
            return [[float(one is not None and one == other) for other in said] for one in said[: len(texts)]], 0
        if self.utility == "hidden":
            ids = [words_of(model, text)[: model.max_length] for text in evidence]
            vectors = hidden_means(model, ids, ROWS)
            unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            return (unit[: len(texts)] @ unit.T).tolist(), int(blocks(ids, [()] * len(ids)).sum())
        return [self._judged(prompt, text, evidence) for text in texts], 0

    def _judged(self, prompt: str, text: str, evidence: list[str]) -> list[float]:
        """What the user's function says of a text.

        Raises:
          ScorerError: if it fails, or does not return a finite number for each piece of evidence.
        """
        if isinstance(self.utility, str):
            raise ScorerError(f"utility {self.utility!r} is no function: bind the method to a model first")
        try:
            found = [float(own) for own in self.utility(prompt, text, list(evidence))]
        except Exception as error:  # whatever the user's code raises
            raise ScorerError(f"the utility of x_mbr failed: {type(error).__name__}: {error}") from error
        if len(found) != len(evidence) or not all(map(math.isfinite, found)):
            raise ScorerError(
                f"the utility of x_mbr must return a finite number for each text of the evidence: {found!r:.60} for "
                f"{len(evidence)}"
            )
        return found
