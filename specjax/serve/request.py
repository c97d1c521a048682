"""One prompt to complete, and the record of its completion."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.sampling import Sampling

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how to complete it. Names are those of `specjax.generate`.

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
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    suffix: Any = None
    suffix_ids: tuple[int, ...] = ()
    sample: int | None = None


@dataclasses.dataclass(frozen=True)
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
      warped_logprobs: the same under the law it was drawn from.
      accepted: how many steps accepted 0, 1, 2 ... draft tokens (diffusion: committed so many tokens).
      suffix: what follows the new text, as given, or None.
      error: what went wrong where `finish_reason` is error.
      sample: which of several completions of its prompt (from 0), or None where there is one.
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

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object; optional fields that are None are left out."""
        always = ("prompt", "text", "tokens", "finish_reason", "new_tokens", "steps", "tokens_per_step")
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None or k in always}

    @classmethod
    def failed(cls, prompt: Any, error: str, id: str | None = None, line: int | None = None) -> "Record":
        """The record of a request that never ran."""
        return cls(prompt, None, [], "error", 0, 0, 0.0, id=id, line=line, error=error)


def sampling_of(requests: Sequence[Request]) -> Sampling:
    """The sampling parameters of these requests, one row each."""
    return Sampling.make(len(requests), **{n: [getattr(r, n) for r in requests] for n in _SAMPLING})


def check_options(options: dict[str, Any]) -> None:
    """Checks the options of a request.

    Raises:
      ValueError: naming the option that is out of range, and its range.
    """
    count, seed = options.get("max_new_tokens", 1), options.get("seed", 0)
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"max_new_tokens must be an integer >= 1, got {count!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    chosen = {name: options[name] for name in _SAMPLING if name in options}
    for name, value in chosen.items():  # before they are rounded to 32 bits
        large = 2**31 if name == "top_k" else 1e38
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not abs(value) < large:
            raise ValueError(f"{name} must be a finite number below {large:g}, got {value!r:.40}")
    Sampling.make(1, **chosen)
