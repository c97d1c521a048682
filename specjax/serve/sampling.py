"""A user's options of one prompt: everything that may differ between rows without another program."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.names import hint
from specjax.sampling_fields import SamplingFields
from specjax.sampling_params import FIELDS, check_value

MAX_NEW_TOKENS = 128
"""The default limit of new tokens."""
_NUMBERS = {
    "max_new_tokens": ("an integer >= 1 and below 2^31", lambda x: 1 <= x < 2**31),
    "seed": ("an integer", lambda x: True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(SamplingFields):
    """The options of a prompt: parameters of warpers, and when its text ends.

    Warpers have parameters such as `temperature` (0 is greedy), `top_k` and `top_p`; see `specjax samplers`. A field
    that is None takes its value from the model's `generation_config.json` if it applies (`specjax.models.generation`),
    and otherwise its default.

    Attributes:
      max_new_tokens: the limit of new tokens, at least 1; None: 128.
      seed: decides the noise, together with the prompt; None: 0.
      stop: one or several strings that end the text, which does not include them.
      ignore_eos: whether to continue after an end of text.

    Raises:
      ValueError: naming the option that is out of range, and its range.

    >>> Sampling(temperature=0.7, top_h=0.4).given
    {'temperature': 0.7, 'top_h': 0.4}
    """

    max_new_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        check_options(vars(self))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))

    @property
    def given(self) -> dict[str, Any]:
        """The options that were set."""
        off = ([] if self.stop else ["stop"]) + ([] if self.ignore_eos else ["ignore_eos"])
        return {name: value for name, value in vars(self).items() if value is not None and name not in off}

    def replace(self, **options: Any) -> "Sampling":
        """A copy with other options; options given as None keep their values."""
        return dataclasses.replace(self, **{name: value for name, value in options.items() if value is not None})


OPTIONS: dict[str, Any] = {
    **{name: field.type for name, field in FIELDS.items()}, "max_new_tokens": int, "seed": int, "ignore_eos": bool
}  # fmt: skip
"""The options of a prompt and their types, without `stop`."""


WORDS = ("stop", *(name for name, field in FIELDS.items() if field.metadata.get("parse") is str))
"""Options whose values in a line are words, not JSON."""


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options of a prompt; None counts as not given.

    Raises:
      ValueError: naming the option that is out of range, and its range.
    """
    for name, value in options.items():
        if value is None:
            continue
        if name in FIELDS:
            check_value(FIELDS[name], value)
        elif name in _NUMBERS:
            valid, holds = _NUMBERS[name]
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not holds(value):
                raise ValueError(f"{name} must be {valid}, got {value!r:.40}")
        elif name == "ignore_eos" and not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"ignore_eos must be true or false, got {value!r:.40}")
        elif name == "stop":
            check_stop(value)


def check_stop(stop: Any) -> None:
    """Raises ValueError on invalid stop strings."""
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or not all(isinstance(own, str) for own in stop):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r:.40}")
    if "" in stop:
        raise ValueError("a stop string must not be empty")


def read_sampling(lines: Sequence[str]) -> dict[str, Any]:
    """Options of a prompt from lines such as `top_h=0.4,suppress_tokens=[198, 628]`, or JSON objects.

    >>> read_sampling(["top_h=0.4,suppress_tokens=[198, 628]", '{"ignore_eos": true}'])
    {'top_h': 0.4, 'suppress_tokens': [198, 628], 'ignore_eos': True}

    Raises:
      ValueError: on an unknown option, or a value that is not JSON.
    """
    found: dict[str, Any] = {}
    for text in lines:
        found |= _object(text) if text.lstrip()[:1] == "{" else dict(_item(item) for item in _items(text))
    known = {name: name for name in (*OPTIONS, "stop")}
    for name in found:
        if name not in known:
            raise ValueError(
                f"--sampling: there is no option {name!r}; {hint(name, known) or 'see `specjax samplers`'}"
            )
    check_options(found)
    return found


def _items(text: str) -> list[str]:
    return [item for item in re.split(r",(?=\s*\w+\s*=)", text) if item.strip()]


def _item(item: str) -> tuple[str, Any]:
    name, found, value = item.partition("=")
    if not found:
        raise ValueError(f"--sampling {item!r} is not OPTION=VALUE")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        if name.strip() in WORDS:
            return name.strip(), value
        raise ValueError(f"--sampling: {name.strip()} must be a number, true, false or a list, got {value!r}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"--sampling {text!r:.60} begins as JSON, but is not valid JSON: {error}") from error
