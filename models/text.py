"""From text and chat messages to token ids, and from token ids to new text."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.lm import encodes
from specjax.models.messages import rendered
from specjax.models.token_ids import is_features, one


@dataclasses.dataclass(frozen=True)
class Chat:
    """Settings of a chat template, beyond the messages.

    Attributes:
      tools: the tools that the model may call, as `apply_chat_template` of transformers takes them: JSON schemas or
        functions.
      template_kwargs: other variables of the template, such as `{"enable_thinking": False}`.
      continue_last: whether the last message is continued, like `continue_final_message` of transformers; None: if it
        is the assistant's.
    """

    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continue_last: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for `apply_chat_template`."""
        return {**({} if self.tools is None else {"tools": list(self.tools)}), **self.template_kwargs}


def encoded(model: Any, prompt: str | Sequence[Any], what: str = "prompt", chat: Chat | None = None) -> tuple[int, ...]:
    """A prompt's token ids, with the special tokens that the tokenizer adds.

    Args:
      model: what `specjax.models.load` returned.
      prompt: text, token ids (see `specjax.models.token_ids`), or chat messages (`{"role": ..., "content": ...}`) for
        the tokenizer's chat template (see `specjax.models.messages`).
      what: the prompt's name in errors.
      chat: how messages are written.

    Raises:
      ValueError: on an empty prompt, ids outside the vocabulary, text without a tokenizer, messages without a chat
        template, or a prompt that leaves no room for a token.
    """
    ids = _ids(model, prompt, what, chat, model.lm.vocab_size)
    if model.any_subset and isinstance(prompt, str):
        ids = _going_on(model.tokenizer, prompt, ids)
    if model.masked and model.masked.mask_id in ids:
        raise ValueError(
            f"the {what} holds the mask token (id {model.masked.mask_id}), which stands for a position to fill in; "
            "leave it out, and give what follows the open span as suffix"
        )
    if model.canvas and model.canvas.image_id in ids:
        raise ValueError(
            f"the {what} holds an image (token id {model.canvas.image_id}), and only the text part of {model.name} "
            "is read: leave images out"
        )
    if len(ids) >= model.max_length:
        raise ValueError(
            f"the {what} has {len(ids)} tokens, which is more than {model.name} has room for: its capacity is "
            f"{model.max_length} positions, prompt and output together; shorten the {what}"
        )
    return tuple(ids)


def _going_on(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int]:
    """The ids of a text without the special tokens that a tokenizer puts after it, since the text goes on."""
    own = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    begins = (at for at in range(len(ids) - len(own) + 1) if list(ids[at : at + len(own)]) == own)
    at = next(begins, None)
    return list(ids) if at is None else list(ids[: at + len(own)])


def gapped(model: Any, prompt: str | Sequence[Any], chat: Chat | None = None) -> tuple[int, ...]:
    """The token ids of a text with gaps: -1 where a text has the model's mask token, or a list of ids has -1.

    Args:
      model: an any-subset model.
      prompt: see `encoded`.
      chat: see `encoded`.

    Raises:
      ValueError: on an empty prompt, or one that the tokenizer cannot read.
    """
    prompt, mask = one(prompt), model.masked.mask_id
    opened = {i for i, token in enumerate(prompt) if token == -1} if isinstance(prompt, (list, tuple)) else set()
    known = [0 if i in opened else token for i, token in enumerate(prompt)] if opened else prompt
    ids = _ids(model, known, "prompt", chat, model.lm.vocab_size)
    return tuple(-1 if i in opened or token == mask else token for i, token in enumerate(ids))


def _ids(model: Any, prompt: Any, what: str, chat: Chat | None, vocab: int) -> list[int]:
    """A prompt's ids, of a vocabulary of so many tokens; see `encoded`."""
    prompt = one(prompt)
    if is_features(prompt):
        raise ValueError(f"{model.name} reads tokens, not features [S, F]: give the {what} as text or as token ids")
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
    if outside := [i for i in ids if not 0 <= i < vocab]:
        raise ValueError(f"{what} id {outside[0]} is outside the vocabulary of {vocab} tokens")
    return ids


def check_starts(model: Any) -> None:
    """Raises ValueError if a model with an encoder does not say how its texts begin, or another model does."""
    if encodes(model.lm) and not model.starts:
        raise ValueError(
            f"{model.name} has an encoder, and nothing says how its texts begin: give specjax.models.Model the ids as starts"
        )
    if model.starts and not encodes(model.lm):
        raise ValueError(f"{model.name} has no encoder, so its texts begin with the prompts: leave starts out")
    if outside := [token for token in model.starts if not 0 <= token < model.lm.vocab_size]:
        raise ValueError(f"starts holds the token {outside[0]}, outside the vocabulary of {model.lm.vocab_size} tokens")


def source_of(model: Any, prompt: Any, chat: Chat | None = None) -> Any:
    """What a model's encoder reads of a prompt: token ids, as `encoded` makes them, or features `[S, F]` float32.

    Args:
      model: what `specjax.models.load` returned, with an encoder.
      prompt: see `encoded`; or an array `[S, F]`.
      chat: see `encoded`.

    Raises:
      ValueError: see `encoded`; on features for an encoder of tokens, and the other way round.
    """
    lm, given = model.lm, prompt
    wanted = getattr(lm, "source_features", None)
    if wanted or wanted is None and is_features(prompt):
        return _features(model, given, wanted)
    ids = _ids(model, prompt, "prompt", chat, getattr(lm, "source_vocab_size", 0) or lm.vocab_size)
    most = getattr(lm, "source_longest", None)
    most = model.max_length if most is None else most
    if most and len(ids) > most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, and the encoder of {model.name} has room for {most}: shorten the prompt"
        )
    return tuple(ids)


def _features(model: Any, given: Any, wanted: int | None) -> Any:
    """A prompt as an array `[S, F]` of finite float32, of F = `wanted` features (None: any number).

    Raises:
      ValueError: if it is none, or does not fit the encoder.
    """
    name, frames = model.name, getattr(model.lm, "source_frames", 0)
    form = f"[{frames or 'S'}, {wanted or 'F'}]"
    if not is_features(given):
        raise ValueError(
            f"{name} reads features, not {type(given).__name__}: give each prompt, from Python, as an array {form} of floats; "
            "of a feature extractor of transformers, its input_features[0].T"
        )
    found, shape = one(given), tuple(given.shape)
    if wanted and shape[0] == wanted != shape[1]:
        raise ValueError(f"{name} reads features {form}, and these are {[*shape]}, features first: give their .T")
    if wanted and shape[1] != wanted or not shape[0] or frames and shape[0] != frames:
        raise ValueError(f"{name} reads features {form}, and these are {[*shape]}: pad, cut or extract them anew")
    if not np.isfinite(found).all():
        raise ValueError(f"a prompt of {name} has features that are not finite: extract them anew")
    return found


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
      ValueError: on text that is not Unicode, and on messages without a template or that the template cannot render.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
        return tokenizer.encode(prompt, verbose=False) if prompt else []
    chat = chat or Chat()
    text = rendered(tokenizer, prompt, model, chat.continue_last, **chat.options)
    check_unicode(text, "chat")
    # the template writes special tokens itself
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError, naming `what`, if a text is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} is not valid Unicode: {error.reason} at character {error.start}") from error


HALF = "\ufffd"
"""The replacement for bytes that form no character, such as those of an incomplete one."""


def new_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], whole: bool = False) -> str | None:
    """The text that `tokens` add to `prompt`; None without a tokenizer.

    The tokens are decoded together with the prompt, since some tokenizers drop a space at the start of a text. A
    character that begins in the prompt's ids and ends after them belongs to the new text.

    Args:
      tokenizer: a transformers tokenizer, or None.
      prompt: the ids before the text.
      tokens: the text's ids.
      whole: whether the prompt was a text, so that it ends with a complete character.
    """
    if tokenizer is None:
        return None
    decode = decoder_of(tokenizer)
    both, before = decode([*prompt, *tokens]), text_before(decode(list(prompt)), whole)
    return "" if not tokens else both[len(before) :] if both.startswith(before) else decode(list(tokens))


def text_before(text: str, whole: bool) -> str:
    """A prompt's text without an incomplete character at its end; `whole`: there is none."""
    return text if whole else text.rstrip(HALF)


def decoder_of(tokenizer: Any, special: bool = False) -> Callable[[list[int]], str]:
    """A function from ids to text; with `special`, it also writes special tokens, under their own names."""
    return functools.partial(tokenizer.decode, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
