"""Token ids and features in the forms that callers have: lists, arrays of numpy, JAX or torch, tokenizer outputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_IDS, _MASK = "input_ids", "attention_mask"
_UNREAD = ("token_type_ids", "special_tokens_mask", "offset_mapping", "length")
"""Other fields of a tokenizer's output, which are ignored."""


def is_array(value: Any) -> bool:
    """Whether it is an array, of any library."""
    return hasattr(value, "__array__") and hasattr(value, "shape")


def is_encoding(value: Any) -> bool:
    """Whether it is a tokenizer's output: `input_ids`, and a mask if they are padded."""
    return isinstance(value, Mapping) and _IDS in value


def is_features(value: Any) -> bool:
    """Whether it is an array `[S, F]` of numbers that are no ids, such as frames of audio."""
    return is_array(value) and len(value.shape) == 2 and _numbers(value).dtype.kind == "f"


def shown(prompt: Any) -> Any:
    """What stands for a prompt in requests and records: itself or, of features, their shape in words.

    >>> shown(np.zeros((60, 10), np.float32)), shown([3, 4])
    ('features [60, 10]', [3, 4])
    """
    return f"features {[*prompt.shape]}" if is_features(prompt) else prompt


def _numbers(array: Any) -> np.ndarray:
    array = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def listed(value: Any) -> Any:
    """An array as lists of lists; anything else as it is.

    Raises:
      ValueError: if its numbers are not integers.
    """
    if not is_array(value):
        return value
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.kind in "fcbV" or array.dtype.kind == "O" and array.ndim == 0:
        raise ValueError(f"token ids are integers, and this is an array of {array.dtype}")
    return array.tolist()


def rows(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The prompts in a tokenizer's output, without padding, which may be on either side.

    Args:
      encoding: `input_ids` and optionally `attention_mask`, of one prompt `[N]` or of several `[R, N]`.

    Raises:
      ValueError: on other fields, such as images, or a mask that does not say where each prompt is.
    """
    other = [name for name in encoding if name not in (_IDS, _MASK, *_UNREAD)]
    if other:
        raise ValueError(f"a prompt with input_ids cannot have {other[0]!r}, only {_MASK}: give options as arguments")
    ids, mask = listed(encoding[_IDS]), listed(encoding.get(_MASK))
    if len(ids) and not isinstance(ids[0], (list, tuple, np.ndarray)):
        ids, mask = [ids], None if mask is None else [mask]
    ids = [listed(row) for row in ids]
    if mask is None:
        return [list(row) for row in ids]
    mask = [listed(row) for row in mask]
    if [len(row) for row in mask] != [len(row) for row in ids]:
        raise ValueError("attention_mask has another shape than input_ids")
    return [_real(row, own) for row, own in zip(ids, mask, strict=True)]


def _real(ids: list[int], mask: list[int]) -> list[int]:
    kept = [place for place, seen in enumerate(mask) if seen]
    if any(seen not in (0, 1) for seen in mask) or kept and kept[-1] - kept[0] >= len(kept):
        raise ValueError("attention_mask must be 1 over each prompt and 0 before or after it")
    return [ids[place] for place in kept]


def one(prompt: Any) -> Any:
    """A single prompt: an array or a tokenizer's output as a list of ids, features as float32, anything else as it is.

    Raises:
      ValueError: if it holds several prompts.
    """
    if is_features(prompt):
        return _numbers(prompt).astype(np.float32)
    found = rows(prompt) if is_encoding(prompt) else listed(prompt)
    if found is prompt or not isinstance(found, list) or not found or not isinstance(found[0], list):
        return found
    if len(found) > 1:
        raise ValueError(f"this is one prompt, and an array of {len(found)} rows was given: give them one by one")
    return found[0]


def several(prompts: Any) -> Any:
    """Prompts as a list: an array or a tokenizer's output becomes lists of ids, also as a member of a list.

    An array `[R, S, F]` becomes R arrays of features. Anything else is returned as it is.

    Raises:
      ValueError: on an array that is neither one prompt nor one prompt per row.
    """
    if is_encoding(prompts):
        return rows(prompts)
    if is_array(prompts):
        shape = tuple(prompts.shape)
        if len(shape) == 3 and shape[0] and is_features(prompts[0]):
            return [one(prompt) for prompt in prompts]
        if is_features(prompts):
            return [one(prompts)]
        if len(shape) not in (1, 2) or shape == (0,):
            raise ValueError(
                f"an array of token ids is one prompt [N] or several [R, N], N at least 1: this one is {[*shape]}"
            )
        return listed(prompts)
    return [one(prompt) for prompt in prompts] if isinstance(prompts, (list, tuple)) else prompts
