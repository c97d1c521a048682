"""Options of decoding, each written once: keyword arguments, flags, fields of input lines and manifests come from these fields.

A field's metadata says what it does (`help`), which values it may have (`valid` and `holds`, or `least`), and how it reads on a
command line (`metavar`, `choices`, `nargs`, `positional`, or `hidden`).
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from specjax.assembly.assemble import Plan
from specjax.models.generation import APPLIED
from specjax.names import check_keywords
from specjax.sampling_params import FIELDS, SamplingOptions, check_value
from specjax.warpers import parameter

Options = TypeVar("Options")
Target = TypeVar("Target", bound=Callable)


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


def with_keywords(rest: str, *classes: type) -> Callable[[Target], Target]:
    """Writes the fields of dataclasses into the signature of a function, or of a class's `__init__`, in place of its `**rest`.

    It is called with all of them, and with nothing else that its signature does not have. In its docstring they stand where
    `**rest` does, as the dataclasses describe their attributes.
    """

    def decorate(target):
        if not isinstance(target, type):
            return _documented(_called(target, rest, classes), rest, classes)
        target.__init__ = _called(target.__init__, rest, classes)
        return _documented(target, rest, classes)

    return decorate


def _called(function: Callable, rest: str, classes: Sequence[type]) -> Callable:
    plain = inspect.signature(function)
    own = {name: given for name, given in plain.parameters.items() if name != rest}
    more = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for cls in classes
        for field in dataclasses.fields(cast(Any, cls))
        if field.name not in own
    ]
    signature = plain.replace(parameters=[*own.values(), *more])

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        check_keywords(function.__qualname__.removesuffix(".__init__"), kwargs, signature.parameters)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.args, **bound.kwargs)

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def _documented(target: Any, rest: str, classes: Sequence[type]) -> Any:
    if target.__doc__ is None:  # under `python -OO`
        return target
    lines = inspect.cleandoc(target.__doc__).splitlines()
    at = lines.index(f"  **{rest}:")
    known = {line.strip().partition(":")[0] for line in lines if re.match(r"  \w+: ", line)}
    entries = [entry for cls in classes for name, entry in described(cls).items() if name not in known]
    target.__doc__ = "\n".join([*lines[:at], *entries, *lines[at + 1 :]])
    return target


def described(cls: type) -> dict[str, str]:
    """What a dataclass and those that it extends say of their attributes, as lines of a section of a docstring."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        section = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
        entries = re.split(r"\n(?=  \w)", section) if dataclasses.is_dataclass(part) and section else []
        found |= {entry.strip().partition(":")[0]: entry for entry in entries}
    return found


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
      dtype: of the parameters; None is float32 on a CPU and bfloat16 elsewhere; see `specjax.models.load` for "layercast".
      mesh: a mesh, or a line such as `"data=2,model=4"`.
      adapter: the folder of a PEFT LoRA adapter, or its hub id, for the model that is loaded; see `specjax.models.load`.
      longest: how many positions the model that is loaded is used for; see `specjax.models.load`.
      weights: a format that the model's matrices are kept in, such as "int8" or "int4:group=32"; see `specjax.models.load`.
      cache_dtype: the type of its caches, such as "int8" or "float8_e4m3fn"; see `specjax.models.load`.
      reduce_dtype: in which products are summed over a mesh, such as "bfloat16"; see `specjax.models.load`.
    """

    model: Any = option(None, "folder, GGUF file, name or hub id (default: the shipped target)")
    dtype: Any = option(None, "float32, bfloat16, float16 or layercast (default: float32 on a CPU, else bfloat16)")
    mesh: Any = option(None, "devices by axis, such as data=2,model=2,context=2 (default: one device)")
    adapter: Any = option(None, "folder or hub id of a PEFT LoRA adapter, merged into the model", metavar="FOLDER")
    longest: int | None = option(
        None,
        "positions that the model is used for, which decides the rope of Phi-3 (default: its config's)",
        metavar="N",
    )
    weights: str | None = option(
        None,
        "keeps the model's matrices in few bits: int8, int4 (int4:group=32), fp8, or bfloat16 without loss, dfloat11; "
        ",vocab=true: embeddings and head too",
        metavar="FORMAT",
    )
    cache_dtype: Any = option(
        None,
        "of the cache of an autoregressive model: float32, bfloat16, float16, int8 or float8_e4m3fn (default: as the "
        "parameters)",
        metavar="DTYPE",
    )
    reduce_dtype: Any = option(
        None,
        "in which a mesh sums products: float32 or bfloat16, half the exchange (default: float32)",
        metavar="DTYPE",
    )


MAX_NEW_TOKENS = 128
"""New tokens of a prompt, at most, where nobody says so."""


def _given() -> Any:
    """The parameters of warpers as a user gives them."""
    copies = []
    for field in dataclasses.fields(SamplingOptions):
        usual = "the model's, else " if field.name in APPLIED else ""
        said = "shape" in field.metadata or field.default is None  # by the help itself
        usual = "" if said else f" (default: {usual}{field.default:g})"
        about = {**field.metadata, "help": field.metadata["help"] + usual}
        copies.append((field.name, cast(Any, field.type) | None, dataclasses.field(default=None, metadata=about)))
    return dataclasses.make_dataclass("Given", copies, frozen=True, kw_only=True, namespace={"__module__": __name__})


Given: Any = _given()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions(Given):
    """What may differ from prompt to prompt; None where the user does not say. A parameter of a warper is then what the model's
    `generation_config.json` says, where that counts (`specjax.models.generation`), or else its default.

    Attributes:
      max_new_tokens: new tokens, at most; at least 1; None: 128.
      seed: with the prompt it decides the noise.
    """

    max_new_tokens: int | None = parameter(
        None,
        f"new tokens a prompt, at most (default: {MAX_NEW_TOKENS})",
        "an integer >= 1 and below 2^31",
        lambda x: 1 <= x < 2**31,
    )
    seed: int = parameter(0, "with the prompt it decides the noise", "an integer", lambda x: True)

    @property
    def given(self) -> dict[str, Any]:
        """Those that the user has set, and the seed."""
        every = {name: getattr(self, name) for name in PROMPT_OPTIONS}
        return {name: value for name, value in every.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What all prompts of a run have in common.

    Attributes:
      chat: whether a prompt that is a text is a user's turn of the model's chat template.
      suffix: of a diffusion model: what follows the new text, a string or token ids; `max_new_tokens` are filled in before it.
      num_return_sequences: independent completions of each prompt, one after the other; of a search its best texts.
      select: takes one of these completions, a line such as `"majority"` or `"borda:power=0.7"`, see `specjax searches`; None:
        all.
      answer: of a selection: a regular expression, whose last match (its first group, where it has one) is what a completion
        says; None: all of its text.
      stop: a string or several that end a text; they are left out of it.
      ignore_eos: whether to go on after EOS.
      batch_size: rows decoded together; changes speed, never text.
      shared_prefix: whether to prefill what all prompts begin with once, where that is 16 tokens or more.
      prompt_logprobs: whether records carry log-probabilities of their prompts' tokens, for which every prompt is read once
        more; of an autoregressive model.
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


PROMPT_OPTIONS: dict[str, Any] = {
    **{field.name: field.type for field in dataclasses.fields(SamplingOptions)}, "max_new_tokens": int, "seed": int
}  # fmt: skip
"""The options of a prompt, and their types."""


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options of a prompt; None is as if it were not there.

    Raises:
      ValueError: naming the option that is out of range, and its range.
    """
    for field in dataclasses.fields(PromptOptions):
        value = options.get(field.name)
        if value is None:
            continue
        if field.name in FIELDS:
            check_value(FIELDS[field.name], value)
        elif isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not field.metadata["holds"](value):
            raise ValueError(f"{field.name} must be {field.metadata['valid']}, got {value!r:.40}")
