"""Options of decoding, each written once: keyword arguments, flags, fields of input lines and manifests come from these fields.

A field's metadata says what it does (`help`), which values it may have (`valid` and `holds`, or `least`), and how it reads on a
command line (`metavar`, `choices`, `nargs`, `positional`, or `hidden`).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from specjax.sampling_params import SamplingOptions, column, read
from specjax.spec.assemble import Plan
from specjax.warpers import parameter

Options = TypeVar("Options")


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass of options.

    Args:
      default: its value; `dataclasses.MISSING` where it must be given.
      help: what it does, in a few words.
      **more: metadata, see above.
    """
    return dataclasses.field(default=default, metadata={"help": help, **more})


def same(cls: type, name: str) -> Any:
    """A field like that of another class: its default and metadata."""
    field = cls.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def take(cls: type[Options], given: Mapping[str, Any]) -> Options:
    """An instance from the entries that are its fields, whatever else there is."""
    return cls(**{field.name: given[field.name] for field in dataclasses.fields(cast(Any, cls))})


def with_keywords(rest: str, cls: type) -> Callable[[Callable], Callable]:
    """Writes the fields of a dataclass into a function's signature, in place of its `**rest`.

    The function is called with all of them, and with nothing else that its signature does not have.
    """

    def decorate(function: Callable) -> Callable:
        plain = inspect.signature(function)
        own = [given for name, given in plain.parameters.items() if name != rest]
        fields = dataclasses.fields(cast(Any, cls))
        more = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields
        ]
        signature = plain.replace(parameters=[*own, *more])

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(*bound.args, **bound.kwargs)

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate


def check_least(options: Any, spell: Callable[[str], str] = str) -> None:
    """Raises ValueError where a field is below its `least`; `spell` turns its name into what the user wrote."""
    for field in dataclasses.fields(options):
        value, least = getattr(options, field.name), field.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ValueError(f"{spell(field.name)} must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(Plan):
    """A model and how to decode with it: the arguments of `specjax.serve.engine.Engine`.

    Attributes:
      model: what `specjax.models.load` returned, a folder, a shipped name or hub id, or None for the shipped target.
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere; see `specjax.models.load`.
      mesh: a mesh, or a line such as `"data=2,model=4"`.
    """

    model: Any = option(None, "folder, shipped name or hub id (default: the shipped target)")
    dtype: Any = option(None, "float32, bfloat16, float16 or layercast (default: float32 on a CPU, else bfloat16)")
    mesh: Any = option(None, "devices by axis, such as data=2,model=2,context=2 (default: one device)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions(SamplingOptions):
    """What may differ from prompt to prompt.

    Attributes:
      max_new_tokens: new tokens, at most.
      seed: with the prompt it decides the noise.
    """

    max_new_tokens: int = parameter(
        128, "new tokens a prompt, at most", "an integer >= 1 and below 2^31", lambda x: 1 <= x < 2**31
    )
    seed: int = parameter(0, "with the prompt it decides the noise", "an integer", lambda x: True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What all prompts of a run have in common.

    Attributes:
      chat: whether a prompt that is a text is a user's turn of the model's chat template.
      suffix: what follows the new text, a string or token ids; of a diffusion model.
      num_return_sequences: independent completions of each prompt, one after the other; of a search its best texts.
      select: which of these completions is taken, a line of `specjax searches`; None: all.
      answer: of a selection: a regular expression for what a completion says; None: all of it.
      stop: strings that end a text.
      ignore_eos: whether to go on after EOS.
      batch_size: rows decoded together.
      shared_prefix: whether to prefill what all prompts begin with once.
      prompt_logprobs: whether records carry log-probabilities of their prompts; of an autoregressive model.
    """

    chat: bool = option(False, "a text is a user's turn of the model's chat template, which the model answers")
    suffix: Any = option(None, "a diffusion model fills in --max-new-tokens tokens before it", metavar="TEXT")
    num_return_sequences: int = option(
        1, "independent completions of each prompt; of a search its best texts", metavar="N", least=1
    )
    select: str | None = option(
        None,
        "take one of them: majority, self_certainty, borda or first_finish (see `specjax searches`)",
        metavar="NAME",
    )
    answer: str | None = option(
        None, "with --select: what a completion says, the last match or its group (default: all of it)", metavar="REGEX"
    )
    stop: tuple[str, ...] = option((), "ends a text and is left out; may be repeated", metavar="STRING")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    batch_size: int = option(8, "rows decoded together; changes speed, never text", least=1)
    shared_prefix: bool = option(False, "prefill what all prompts begin with once")
    prompt_logprobs: bool = option(
        False, "records carry log-probabilities of their prompts' tokens, which are read once more for it"
    )


PROMPT_OPTIONS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(PromptOptions)}
"""The options of a prompt, and their types."""


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options of a prompt.

    Raises:
      ValueError: naming the option that is out of range, and its range.
    """
    for field in dataclasses.fields(PromptOptions):
        if field.name in options:
            _check(field, options[field.name])


def _check(field: dataclasses.Field, value: Any) -> None:
    wrong = f"{field.name} must be {field.metadata['valid']}, got {value!r:.40}"
    if field.name not in SamplingOptions.__dataclass_fields__:  # these are not rounded
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not field.metadata["holds"](value):
            raise ValueError(wrong)
        return
    if "shape" in field.metadata:
        read(field, value)
        return
    large = 2**31 if field.type is int else 1e38
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not abs(value) < large:
        raise ValueError(wrong)
    column(field, value)
