"""From prompts to token ids, from token ids to new text, and where a stop string ends it."""

import functools
from collections.abc import Sequence
from typing import Any


def encode_text(tokenizer: Any, prompt: str | Sequence[dict[str, Any]], model: str) -> list[int]:
    """Token ids of a text, or of chat messages through the tokenizer's chat template.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: text, or messages.
      model: the model's name, for errors.

    Raises:
      ValueError: on text that is not Unicode, or messages that there is no template for or that it cannot render.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
        return tokenizer(prompt, verbose=False)["input_ids"] if prompt else []
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in prompt):
        raise ValueError("every message must be an object with a role (a string) and content")
    if not tokenizer.chat_template:
        raise ValueError(f"{model} has no chat template, so it cannot take messages: give a prompt")
    try:
        text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template of {model} cannot render these messages: {_line(error)}") from error
    # the template writes special tokens itself
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError, naming `what`, where a text is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} is not valid Unicode: {error.reason} at character {error.start}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def new_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """The text that `tokens` add to `prompt`; None without a tokenizer.

    Decoded together with the prompt, since some tokenizers drop a space at the start of a text.
    """
    if tokenizer is None:
        return None
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    before, both = decode(list(prompt)), decode([*prompt, *tokens])
    return both[len(before) :] if both.startswith(before) else decode(list(tokens))


def find_stop(text: str | None, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, or None."""
    if text is None:
        return None
    found = [at for at in (text.find(s) for s in stop if s) if at >= 0]
    return min(found, default=None)
