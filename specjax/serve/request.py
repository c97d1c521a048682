"""One prompt to complete, and the record of its completion."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from specjax.decoder import Needs
from specjax.pretty import short
from specjax.sampling_params import SamplingOptions, form_of, in_use
from specjax.serve.sampling import MAX_NEW_TOKENS
from specjax.warpers import WARPERS


@dataclasses.dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt and how to complete it. Names are those of `specjax.generate`; see `specjax.warpers` for the others.

    Attributes:
      prompt: the text as given, or a list of ids.
      ids: the prompt's token ids.
      id: the caller's name for it, or None; with the seed it decides the noise.
      line: where it came from in an input file (from 1), or None.
      stop: strings that end its text.
      ignore_eos: whether it goes on after an end of text.
      suffix: what follows the new text, as given, or None.
      suffix_ids: its token ids.
      sample: which of several completions of its prompt (from 0), or None where there is one.
      max_new_tokens: new tokens, at most.
      seed: with the prompt it decides the noise.
    """

    prompt: Any
    ids: tuple[int, ...]
    id: str | int | None = None
    line: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    suffix: Any = None
    suffix_ids: tuple[int, ...] = ()
    sample: int | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    seed: int = 0

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text, whose ids end with a whole character."""
        return isinstance(self.prompt, str)


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """A completion; its fields are those of the JSON output.

    Attributes:
      prompt: as given.
      text: the new text, up to a stop string; None without a tokenizer.
      tokens: the new ids, EOS included.
      finish_reason: eos, stop, length or error.
      new_tokens: how many.
      steps: target passes.
      tokens_per_step: tokens a target pass, those of the last call beyond a stop string included.
      id: the caller's name for it, or None.
      line: its line in the input file, or None.
      logprobs: of every new token, under the model's own softmax; None where not asked for.
      warped_logprobs: the same under the distribution it was drawn from.
      accepted: how many steps accepted 0, 1, 2 ... draft tokens (diffusion: committed so many tokens).
      suffix: what follows the new text, as given, or None.
      error: what went wrong where `finish_reason` is error.
      sample: which of several completions of its prompt (from 0), or None where there is one.
      score: of a search: what its texts are ranked by (of a beam search the log-probability, over a power of the length); of a
        selection: what the completion that was taken is worth.
      chosen: of a selection: which of the completions of its prompt this is (from 0); `sample` is None then.
      nll: the negative log-likelihood of its tokens, the sum of `-logprobs`; of a greedy text an uncertainty (G-NLL,
        arXiv:2412.15176); None without `logprobs`.
      self_certainty: the mean over its tokens of how far the model's own distribution is from the uniform one, in nats;
        None without `logprobs`.
      prompt_logprobs: of every token of the prompt after those before it, under the model's own softmax, None for the first;
        None as a whole where not asked for.
    """

    prompt: Any
    text: str | None
    tokens: list[int]
    finish_reason: str
    new_tokens: int
    steps: int
    tokens_per_step: float
    id: str | int | None = None
    line: int | None = None
    logprobs: list[float] | None = None
    warped_logprobs: list[float] | None = None
    accepted: list[int] | None = None
    suffix: Any = None
    error: str | None = None
    sample: int | None = None
    score: float | None = None
    chosen: int | None = None
    nll: float | None = None
    self_certainty: float | None = None
    prompt_logprobs: list[float | None] | None = None

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.tokens
        about = f"{self.finish_reason}, {self.new_tokens} tokens in {self.steps} steps"
        return f"Record({short(self.prompt, 40)} -> {short(shown, 40)}, {self.error or about})"

    def _repr_html_(self) -> str:
        """The record as a small table, for notebooks."""
        rows = {
            "prompt": self.prompt,
            "text": self.tokens if self.text is None else self.text,
            "finish reason": self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}",
            "tokens per step": f"{self.tokens_per_step:.2f} ({self.new_tokens} tokens in {self.steps} steps)",
        }
        style = "text-align: left; white-space: pre-wrap"
        lines = (
            f'<tr><th>{name}</th><td style="{style}">{html.escape(_cut(value))}</td></tr>'
            for name, value in rows.items()
        )
        return f"<table>{''.join(lines)}</table>"

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object; optional fields that are None are left out."""
        always = ("prompt", "text", "tokens", "finish_reason", "new_tokens", "steps", "tokens_per_step")
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None or k in always}

    @classmethod
    def failed(cls, prompt: Any, error: str, id: str | int | None = None, line: int | None = None) -> "Record":
        """The record of a request that never ran."""
        return cls(prompt, None, [], "error", 0, 0, 0.0, id=id, line=line, error=error)


def _cut(value: Any) -> str:
    """A value as text; of a long one the beginning and the end."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 1000 else f"{text[:700]} ... {text[-250:]}"


def several(item: "Request | Record", count: int) -> "list[Request | Record]":
    """As many completions of a request, told apart by `sample`; one alone, or a record, stays as it is."""
    if count == 1 or isinstance(item, Record):
        return [item]
    return [dataclasses.replace(item, sample=i) for i in range(count)]


def rows_of(requests: Sequence[Request], num_texts: int) -> list[list[int]]:
    """Which requests share a row that ends with up to so many texts: several completions of one prompt, next to each other.

    >>> prompts = [Request("a", (1,), sample=0), Request("a", (1,), sample=1), Request("a", (1,), sample=0)]
    >>> rows_of(prompts, 4), rows_of(prompts, 1)
    ([[0, 1], [2]], [[0], [1], [2]])
    """
    rows: list[list[int]] = []
    for index, request in enumerate(requests):
        if num_texts > 1 and rows and follows(requests[rows[-1][-1]], request):
            rows[-1].append(index)
        else:
            rows.append([index])
    return rows


def follows(before: Request, request: Request) -> bool:
    """Whether it is a later completion of the same prompt."""
    if before.sample is None or request.sample is None or request.sample <= before.sample:
        return False
    names = [field.name for field in dataclasses.fields(Request) if field.name not in ("prompt", "suffix", "sample")]
    return all(getattr(before, name) == getattr(request, name) for name in names)


BRIEF = 512
"""New tokens of a brief job, at most: a few seconds of decoding, or as long as one more program takes to compile."""


def needs_of(requests: Sequence[Request]) -> Needs:
    """The needs of these requests: what the program that decodes them must be able to do."""
    greedy = not any(in_use(each, request) for request in requests for each in WARPERS)
    return Needs(greedy, sum(r.max_new_tokens for r in requests) <= BRIEF, form_of(requests))
