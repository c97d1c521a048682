"""From text and chat messages to token ids, and from token ids to new text."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.models.messages import rendered
from specjax.models.token_ids import one


@dataclasses.dataclass(frozen=True)
class Chat:
    """Settings of a chat template, beyond the messages.

    Attributes:
      tools: what the model may call, as `apply_chat_template` of transformers takes them: JSON schemas or functions.
      template_kwargs: what else the template reads, such as `{"enable_thinking": False}`.
      continue_last: whether the last message goes on, as `continue_final_message` of transformers has it; None: where it is the
        assistant's.
    """

    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_last: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `apply_chat_template`."""
        return {**({} if self.tools is None else {"tools": list(self.tools)}), **self.template_kwargs}


def encoded(model: Any, prompt: str | Sequence[Any], what: str = "prompt", chat: Chat | None = None) -> tuple[int, ...]:
    """A prompt's token ids, special tokens added as the tokenizer does.

    Args:
      model: what `specjax.models.load` returned.
      prompt: text, token ids (see `specjax.models.token_ids`), or chat messages (`{"role": ..., "content": ...}`) for the
        tokenizer's chat template, see `specjax.models.messages`.
      what: its name in errors.
      chat: how messages are written.

    Raises:
      ValueError: on an empty prompt, ids outside the vocabulary, text without a tokenizer, messages without a chat
        template, or a prompt that leaves no room for a token.
    """
    prompt = one(prompt)
    if not isinstance(prompt, (str, list, tuple)):
        raise ValueError(f"a {what} is a string, a list of token ids or a list of chat messages, not {prompt!r}")
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer: give prompts as lists of token ids")
        ids = encode_text(model.tokenizer, prompt, model.name, chat)
    else:
        try:
            ids = [operator.index(i) for i in prompt]
        except TypeError as error:
            raise ValueError(f"a {what} is a string, a list of token ids or a list of chat messages") from error
    if not ids:
        raise ValueError(f"the {what} is empty: give at least one token")
    vocab = model.lm.vocab_size
    outside = [i for i in ids if not 0 <= i < vocab]
    if outside:
        raise ValueError(f"{what} id {outside[0]} is outside the vocabulary of {vocab} tokens")
    if model.masked and model.masked.mask_id in ids:
        raise ValueError(
            f"the {what} holds the mask token (id {model.masked.mask_id}), which stands for a position to fill in; "
            "leave it out, and give what follows the open span as suffix"
        )
    if model.canvas and model.canvas.image_id in ids:
        raise ValueError(
            f"the {what} holds an image (token id {model.canvas.image_id}), and of {model.name} only the text "
            "part is read: leave images out"
        )
    if len(ids) >= model.max_length:
        raise ValueError(
            f"the {what} has {len(ids)} tokens, which is more than {model.name} has room for: its capacity is "
            f"{model.max_length} positions, prompt and output together; shorten the {what}"
        )
    return tuple(ids)


def encode_text(
    tokenizer: Any, prompt: str | Sequence[dict[str, Any]], model: str, chat: Chat | None = None
) -> list[int]:
    """Token ids of a text, or of chat messages through the tokenizer's chat template.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: text, or messages.
      model: the model's name, for errors.
      chat: how messages are written.

    Raises:
      ValueError: on text that is not Unicode, or messages that there is no template for, or that cannot be written with it.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
        return tokenizer.encode(prompt, verbose=False) if prompt else []
    chat = chat or Chat()
    text = rendered(tokenizer, prompt, model, chat.continue_last, **chat.options)
    # the template writes special tokens itself
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError, naming `what`, where a text is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} is not valid Unicode: {error.reason} at character {error.start}") from error


HALF = "\ufffd"
"""What stands for bytes that are no character, such as those of one that is not whole yet."""


def new_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], whole: bool = False) -> str | None:
    """The text that `tokens` add to `prompt`; None without a tokenizer.

    Decoded together with the prompt, since some tokenizers drop a space at the start of a text. A character that the prompt's
    ids begin and do not end belongs to the new text.

    Args:
      tokenizer: a transformers tokenizer, or None.
      prompt: ids before the text.
      tokens: its ids.
      whole: whether the prompt was a text, so that it ends with a whole character.
    """
    if tokenizer is None:
        return None
    decode = decoder_of(tokenizer)
    both, before = decode([*prompt, *tokens]), text_before(decode(list(prompt)), whole)
    return "" if not tokens else both[len(before) :] if both.startswith(before) else decode(list(tokens))


def text_before(text: str, whole: bool) -> str:
    """A prompt's text without a character that is not whole; `whole`: there is none."""
    return text if whole else text.rstrip(HALF)


def decoder_of(tokenizer: Any, special: bool = False) -> Callable[[list[int]], str]:
    """From ids to text as it is written; `special`: special tokens are written too, under their own names."""
    return functools.partial(tokenizer.decode, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
