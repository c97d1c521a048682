"""One prompt to complete, and the record of its completion."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.decoder import Needs
from specjax.pretty import short
from specjax.sampling_params import form_of, in_use
from specjax.serve.options import PromptOptions
from specjax.warpers import WARPERS


@dataclasses.dataclass(frozen=True)
class Request(PromptOptions):
    """A prompt and how to complete it. Names are those of `specjax.generate`; see `PromptOptions` for the others.

    Attributes:
      prompt: the text as given, or a list of ids.
      ids: the prompt's token ids.
      id: the caller's name for it, or None; with the seed it decides the noise.
      line: where it came from in an input file (from 1), or None.
      suffix: what follows the new text, as given, or None.
      suffix_ids: its token ids.
      sample: which of several completions of its prompt (from 0), or None where there is one.
    """

    prompt: Any
    ids: tuple[int, ...]
    id: str | None = None
    line: int | None = None
    suffix: Any = None
    suffix_ids: tuple[int, ...] = ()
    sample: int | None = None


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
    id: str | None = None
    line: int | None = None
    logprobs: list[float] | None = None
    warped_logprobs: list[float] | None = None
    accepted: list[int] | None = None
    suffix: Any = None
    error: str | None = None
    sample: int | None = None
    prompt_logprobs: list[float | None] | None = None

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.tokens
        about = f"{self.finish_reason}, {self.new_tokens} tokens in {self.steps} steps"
        return f"Record({short(self.prompt, 40)} -> {short(shown, 40)}, {self.error or about})"

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object; optional fields that are None are left out."""
        always = ("prompt", "text", "tokens", "finish_reason", "new_tokens", "steps", "tokens_per_step")
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None or k in always}

    @classmethod
    def failed(cls, prompt: Any, error: str, id: str | None = None, line: int | None = None) -> "Record":
        """The record of a request that never ran."""
        return cls(prompt, None, [], "error", 0, 0, 0.0, id=id, line=line, error=error)


def several(item: "Request | Record", count: int) -> "list[Request | Record]":
    """As many completions of a request, told apart by `sample`; one alone, or a record, stays as it is."""
    if count == 1 or isinstance(item, Record):
        return [item]
    return [dataclasses.replace(item, sample=i) for i in range(count)]


BRIEF = 512
"""New tokens of a brief job, at most: a few seconds of decoding, or as long as one more program takes to compile."""


def needs_of(requests: Sequence[Request]) -> Needs:
    """What these requests ask of the program that decodes them."""
    greedy = not any(in_use(each, request) for request in requests for each in WARPERS)
    return Needs(greedy, sum(r.max_new_tokens for r in requests) <= BRIEF, form_of(requests))
