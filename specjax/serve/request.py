"""One prompt to complete, and the record of its completion."""

import dataclasses
import html
import os.path
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from specjax.decoder import Needs
from specjax.pretty import short
from specjax.sampling_params import SamplingOptions, form_of, in_use
from specjax.serve.sampling import MAX_NEW_TOKENS
from specjax.warpers import WARPERS


@dataclasses.dataclass(frozen=True)
class Request(SamplingOptions):
    """A prompt and how to complete it. Names are as in `specjax.generate`; see `specjax.warpers` for other fields.

    Attributes:
      prompt: the text as given, or a list of ids; of features, their shape in words.
      ids: the token ids with which the text begins: the prompt's, or of a model with an encoder, `Model.starts`.
      id: the caller's name for it, or None; it decides the noise together with the seed.
      line: where it came from in an input file (from 1), or None.
      stop: strings that end its text.
      ignore_eos: whether to continue after an end of text.
      suffix: the text after the new text, as given, or None.
      suffix_ids: the suffix's token ids.
      gaps: of a text with gaps, what lies between `ids` and `suffix_ids`: known tokens, and -1 where it is open.
      sample: its number among several completions of its prompt (from 0), or None if there is only one.
      max_new_tokens: the limit of new tokens.
      seed: decides the noise, together with the prompt.
      source: what a model's encoder reads of the prompt: its token ids, or features `[S, F]`; None without an encoder. Not
        compared, since features are arrays.
      domain: the kind of text that it is, for drafts that learn by domain; no text depends on it. None: it has none.
    """

    prompt: Any
    ids: tuple[int, ...]
    id: str | int | None = None
    line: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    suffix: Any = None
    suffix_ids: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    sample: int | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    seed: int = 0
    source: Any = dataclasses.field(default=None, compare=False)
    domain: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text, so that its ids end with a complete character."""
        return isinstance(self.prompt, str)

    def written(self, count: int) -> int:
        """How many of the `count` tokens after `ids` are new; known tokens between gaps are not."""
        return sum(token < 0 for token in self.gaps[:count]) if self.gaps else count


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """A completion. Its fields are those of the JSON output.

    Attributes:
      prompt: as given; of features, their shape in words.
      text: the new text, up to a stop string; of a text with gaps, that from the first to the last, with what lies
        between. None without a tokenizer.
      tokens: the ids of `text`, EOS included.
      finish_reason: eos, stop, length or error.
      new_tokens: the number of new tokens.
      steps: the number of target passes.
      tokens_per_step: tokens per target pass, including tokens of the last call beyond a stop string.
      id: the caller's name for it, or None.
      line: its line in the input file, or None.
      logprobs: of every new token, under the model's own softmax; None if not requested.
      warped_logprobs: the same under the distribution from which it was drawn.
      accepted: how many steps accepted 0, 1, 2 ... draft tokens (for diffusion: committed so many tokens).
      suffix: the text after the new text, as given, or None.
      error: the error if `finish_reason` is error.
      sample: its number among several completions of its prompt (from 0), or None if there is only one.
      score: for a search, the value that ranks its texts (for a beam search, the log-probability over a power of the
        length); for a selection, the value of the selected completion.
      log_evidence: for a search that aligns a constraint's distribution, the logarithm of the estimated probability that
        a text is in the language.
      chosen: for a selection, the number of the selected completion of its prompt (from 0); `sample` is None then.
      nll: the negative log-likelihood of its tokens, the sum of `-logprobs`; for a greedy text, a measure of
        uncertainty (G-NLL, arXiv:2412.15176); None without `logprobs`.
      self_certainty: the distance of the model's own distribution from the uniform one, in nats, averaged over its
        tokens; None without `logprobs`.
      prompt_logprobs: the log-probability of each token of the prompt given the earlier ones, under the model's own
        softmax; None for the first token, and None as a whole if not requested.
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
    log_evidence: float | None = None
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
        return {k: v for k, v in vars(self).items() if v is not None or k in always}

    @classmethod
    def failed(cls, prompt: Any, error: str, id: str | int | None = None, line: int | None = None) -> "Record":
        """The record of a request that never ran."""
        return cls(prompt, None, [], "error", 0, 0, 0.0, id=id, line=line, error=error)


def _cut(value: Any) -> str:
    """A value as text; a long one is cut to its beginning and end."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 1000 else f"{text[:700]} ... {text[-250:]}"


def several(item: "Request | Record", count: int) -> "list[Request | Record]":
    """Copies of a request for several completions, told apart by `sample`. A record, or a single completion, is
    unchanged."""
    if count == 1 or isinstance(item, Record):
        return [item]
    return [dataclasses.replace(item, sample=i) for i in range(count)]


def rows_of(requests: Sequence[Request], num_texts: int) -> list[list[int]]:
    """The requests that share a row with up to `num_texts` texts: adjacent completions of one prompt.

    >>> prompts = [Request("a", (1,), sample=0), Request("a", (1,), sample=1), Request("a", (1,), sample=0)]
    >>> rows_of(prompts, 4), rows_of(prompts, 1)
    ([[0, 1], [2]], [[0], [1], [2]])
    """
    if num_texts == 1:
        return [[index] for index in range(len(requests))]
    rows: list[list[int]] = []
    for index, request in enumerate(requests):
        if rows and follows(requests[rows[-1][-1]], request):
            rows[-1].append(index)
        else:
            rows.append([index])
    return rows


def follows(before: Request, request: Request) -> bool:
    """Whether a request is a later completion of the same prompt."""
    if before.sample is None or request.sample is None or request.sample <= before.sample:
        return False
    apart = ("prompt", "suffix", "sample", "source")
    names = [field.name for field in dataclasses.fields(Request) if field.name not in apart]
    same = all(getattr(before, name) == getattr(request, name) for name in names)
    return same and (before.source is request.source or np.array_equal(before.source, request.source))


def needed_by(request: Request, longest: int, slack: int) -> int:
    """The text buffer slots that a request needs.

    Args:
      request: the request.
      longest: the most tokens of a text.
      slack: slots beyond the text.
    """
    size = min(len(request.ids) + request.max_new_tokens + len(request.suffix_ids), longest)
    return max(size + slack, len(request.source) if isinstance(request.source, tuple) else 0)


def common_beginning(requests: Iterable[Request]) -> tuple[int, ...]:
    """The ids with which all these requests begin.

    >>> common_beginning([Request("a", (1, 2, 3)), Request("b", (1, 2, 4)), Request("c", (1, 2))])
    (1, 2)
    """
    found: tuple[int, ...] | None = None
    for request in requests:
        found = request.ids if found is None else found
        if request.ids[: len(found)] != found:
            found = tuple(os.path.commonprefix([found, request.ids]))
    return found or ()


BRIEF = 512
"""The most new tokens of a brief job: a few seconds of decoding, about the time to compile one more program."""


def needs_of(requests: Iterable[Request]) -> Needs:
    """The needs of these requests: the features that the program that decodes them must have."""
    greedy, tokens = True, 0

    def seen() -> Iterator[Request]:
        nonlocal greedy, tokens
        for request in requests:
            greedy = greedy and not any(in_use(each, request) for each in WARPERS)
            tokens += request.max_new_tokens
            yield request

    form = form_of(seen())
    return Needs(greedy, tokens <= BRIEF, form)
