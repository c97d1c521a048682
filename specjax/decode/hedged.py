"""Hedged sampling (arXiv:2506.20544): one greedy completion among several drawn ones, of which a selection takes one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.about import About
from specjax.assembly.registry import make_selection
from specjax.search.pool import Drawn, Pool, check_drawn, passes_of
from specjax.search.selection import Candidate, Selection, answer_of, prompt_text
from specjax.search.stepwise import Asked, Stepwise, Written, words_of


@dataclasses.dataclass(frozen=True)
class Hedged(Stepwise):
    """Takes one of several completions, the first of which is greedy and the others drawn.

    A temperature makes completions differ and some of them worse; the greedy one bounds the loss. The drawn ones are those
    that `specjax.generate` draws at this seed (`num_return_sequences`), without its first.

    Attributes:
      samples: completions; 1 is the greedy text.
      select: takes one of them: a `specjax.search.Selection`, or its line, such as
        `majority:answer="answer is ([0-9]+)"`.

    Raises:
      ValueError: for fewer than one completion, or an unknown selection.
    """

    about = About(
        "hedged", "one of several completions: a greedy one, and others that are drawn", "arXiv:2506.20544", "own text",
        fields=("samples", "select"),
    )  # fmt: skip

    samples: int = 5
    select: str | Selection = "majority"

    def __post_init__(self):
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be a whole number from 1 on, got {self.samples!r}")
        if not isinstance(self.selection, Selection):
            raise ValueError(f"select is a selection (specjax.search.Selection) or its line, not {self.select!r:.60}")

    @property
    def selection(self) -> Selection:
        """What takes one of the completions."""
        return make_selection(self.select) if isinstance(self.select, str) else self.select

    @property
    def draws(self) -> int:
        return self.samples

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Stepwise, Any]:
        """See `Decode.bind`; looks for what the selection needs."""
        bound, params = super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)
        return dataclasses.replace(bound, select=self.selection.ready()), params  # type: ignore[type-var]

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
        """For every prompt in order, the completion that the selection takes, with its value as `score`; `steps` are all.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most tokens of a completion.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side, with `samples` rows each.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`, for the drawn completions, which need a temperature.

        Raises:
          ValueError: see `Asked.of`; also for several completions without a temperature, for a model without a tokenizer,
            or for prompts of ids and a selection that reads texts.
        """
        check_drawn(self.samples, sampling)
        selection = self.selection.ready()
        asked = Asked.of([model], prompts, max_new_tokens, seed, sampling, keys, self.draws)
        words_of(model, "")
        if selection.reads_text and any(not prompt_text(prompt) for prompt in asked.prompts):
            raise ValueError("a scorer reads prompts as texts: give texts or chats, or select otherwise")
        parts = asked.parts(batch_size)
        if not parts:
            return []
        lanes = len(parts[0].ids)
        pool = Pool(model, lanes, self.samples, asked, hedged=True, certainty=selection.reads_certainty)
        found: list[Written] = []
        for part in parts:
            for prompt, drawn in zip(part.prompts, pool.draw(part), strict=True):
                at, score = selection.choose([_candidate(prompt, one, selection.answer) for one in drawn])
                step, end = drawn[at].step, drawn[at].end
                steps = tuple(one.step for one in drawn)
                passes = passes_of(drawn)
                found.append(Written(prompt, step.text, list(step.tokens), end, passes, steps=steps, score=score))
        return found


def _candidate(prompt: Any, drawn: Drawn, pattern: str) -> Candidate:
    """What a selection sees of a completion; one that failed has no answer."""
    answer = None if drawn.end == "error" else answer_of(drawn.text, pattern or None)
    return Candidate(
        answer, drawn.certainty, len(drawn.step.tokens), drawn.end == "eos", drawn.text, prompt_text(prompt)
    )
