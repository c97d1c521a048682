"""The prompts of `specjax.generate`, in all accepted forms."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models.token_ids import is_array, is_encoding, several
from specjax.serve.fields import under_own_names
from specjax.serve.sampling import OPTIONS

KINDS = ("prompt", "messages")
"""The fields that hold the prompt."""


def check_there(model: Any) -> None:
    """Raises ValueError because the prompts are missing; `model` is the argument before them."""
    said = (
        f"generate(None, {model!r}) completes that text with the shipped model, and generate({model!r}, TEXT) another"
    )
    raise ValueError(
        f"there are no prompts: they come second, after the model{'; ' + said if isinstance(model, str) else ''}"
    )


def read_prompts(prompts: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Prompts, each with its own options.

    Args:
      prompts: a string, token ids (a list, an array or a tokenizer's output, see `specjax.models.token_ids`), chat
        messages, or an iterable of these. A prompt may also be a dict like a line of an input file, with `prompt` or
        `messages`, and optionally `id`, `suffix`, `stop` and options of a prompt.

    Raises:
      ValueError: on anything else.
    """
    if isinstance(prompts, str) or isinstance(prompts, Mapping) and not is_encoding(prompts):
        prompts = [prompts]
    elif not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts are a string, a list of token ids or chat messages, or several of those, not {prompts!r}"
        )
    elif not isinstance(prompts, Sequence) and not is_array(prompts) and not is_encoding(prompts):
        prompts = list(prompts)
    prompts = several(prompts)
    if len(prompts) and _part_of_one(prompts[0]):
        prompts = [prompts]
    return [_fields(prompt) if isinstance(prompt, Mapping) else (prompt, {}) for prompt in prompts]


def _part_of_one(item: Any) -> bool:
    """Whether it is a token id, or a chat message."""
    return isinstance(item, (int, np.integer)) or isinstance(item, Mapping) and not any(kind in item for kind in KINDS)


def _fields(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = {name: value for name, value in under_own_names(given).items() if value is not None}
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        raise ValueError("a prompt that is a dict has one of prompt and messages, and not both")
    known = (*KINDS, "id", "suffix", "stop", *OPTIONS)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"a prompt has no field {unknown[0]!r}; it may have {', '.join(known)}")
    name = given.get("id", "")
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"the id of a prompt is a string or an integer, not {name!r}")
    return given[kinds[0]], {name: value for name, value in given.items() if name not in kinds}
