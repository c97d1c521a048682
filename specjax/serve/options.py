"""Options of decoding, each defined once: flags, fields of input lines and manifests are derived from these fields.

A field's metadata gives its description (`help`), its `least` value, and its form on a command line (`metavar`,
`choices`, `nargs`, `positional`, or `hidden`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from specjax.decode import Decode
from specjax.decode.lines import decode_of
from specjax.decode.speculate import DEFAULT_DRAFTER
from specjax.serve.sampling import MAX_NEW_TOKENS, Sampling, read_sampling

Options = TypeVar("Options")
_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass of options.

    Args:
      default: its value; `dataclasses.MISSING` if it is required.
      help: a short description.
      **more: metadata, see the module.
    """
    return dataclasses.field(default=default, metadata={"help": help, **more})


def same(cls: type, name: str) -> Any:
    """A field like that of another class: its default and metadata."""
    field = cls.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def take(cls: type[Options], given: Mapping[str, Any]) -> Options:
    """An instance of `cls` from the entries that are its fields; other entries are ignored."""
    return cls(**{field.name: given[field.name] for field in dataclasses.fields(cast(Any, cls))})


def check_least(options: Any, spell: Callable[[str], str] = str) -> None:
    """Raises ValueError if a field is below its `least`; `spell` maps its name to the user's spelling."""
    for field in dataclasses.fields(options):
        value, least = getattr(options, field.name), field.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ValueError(f"{spell(field.name)} must be at least {least}, got {value}")


def read_size(text: str, what: str) -> int:
    """Bytes of a size.

    Args:
      text: a number and a unit.
      what: how an error calls it.

    >>> read_size("24GB", "--memory"), read_size("1.5 GiB", "--memory")
    (24000000000, 1610612736)

    Raises:
      ValueError: for any other text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]I?B)", text.strip().upper())
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise ValueError(f"{what} {text!r} is not a size: give a number above 0 and its unit, such as 24GB or 16GiB")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model and how it is loaded: the arguments of `specjax.load`.

    Attributes:
      model: a folder, a GGUF file, the URL of one, a shipped name or hub id, or None for the shipped target.
      dtype: the type of the parameters.
      mesh: a line such as `"data=2,model=4"`.
      adapter: folders of PEFT LoRA adapters, or their hub ids, which are merged in this order.
      longest: how many positions the model is used for.
      weights: the format of the model's matrices, such as "int8" or "int4:group=32".
      cache_dtype: the type of its caches, such as "int8" or "float8_e4m3fn".
      reduce_dtype: the type in which products are summed over a mesh, such as "bfloat16".
    """

    model: Any = option(None, "folder, GGUF file, URL, name or hub id (default: the shipped target)")
    dtype: Any = option(None, "float32, bfloat16, float16 or layercast (default: float32 on a CPU, bfloat16 elsewhere)")
    mesh: Any = option(None, "devices by axis, such as data=2,model=2,context=2 (default: one device)")
    adapter: tuple[str, ...] = option(
        (), "folder or hub id of a PEFT LoRA adapter, merged into the model; again for a further one", metavar="FOLDER"
    )
    longest: int | None = option(
        None,
        "most positions that the model will be used for; Phi-3 chooses its rope by it (default: the config's)",
        metavar="N",
    )
    weights: str | None = option(
        None,
        "format of the model's matrices: int8, int4 (int4:group=32), fp8, dfloat11 (without loss), hobbit (experts), packed "
        "(as the file has them) or plain; field vocab=true: embeddings and head too (default: packed, on a CPU plain); or a "
        "file with one for each",
        metavar="FORMAT",
    )
    cache_dtype: Any = option(
        None,
        "type of an autoregressive model's cache: float32, bfloat16, float16, int8 or float8_e4m3fn (default: the type of "
        "the parameters)",
        metavar="DTYPE",
    )
    reduce_dtype: Any = option(
        None,
        "type in which a mesh sums products: float32, or bfloat16 to halve the exchange (default: float32)",
        metavar="DTYPE",
    )

    @property
    def of_model(self) -> dict[str, Any]:
        """The arguments of `specjax.load`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelOptions)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options of decoding.

    Attributes:
      decode: a line of `specjax.decode`, such as `"beam:num_beams=4"`.
      drafter: a drafter's line, such as `"prompt_lookup:length=8"`.
    """

    decode: Any = option(
        None,
        "NAME:FIELD=VALUE,...: a search, a diffusion model's policy, or another way to decode; see `specjax searches` and "
        "`specjax policies` (default: the usual drafter, or the model's own policy)",
        metavar="LINE",
    )
    drafter: Any = option(
        None,
        "NAME:FIELD=VALUE,...,verifier=NAME; see `specjax drafters` and `specjax verifiers`; a+b fuses two (default: "
        f"{DEFAULT_DRAFTER}; for several rows on a CPU: draft if one is shipped, otherwise none)",
        metavar="LINE",
    )

    @property
    def way(self) -> Decode | None:
        """The way to decode that the options name; None if they leave it open.

        Raises:
          ValueError: see `specjax.decode.lines.decode_of`.
        """
        return decode_of(self.decode, self.drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of prompts, as flags.

    Attributes:
      temperature: see `specjax.Sampling`.
      top_k: see `specjax.Sampling`.
      top_p: see `specjax.Sampling`.
      max_new_tokens: see `specjax.Sampling`.
      seed: see `specjax.Sampling`.
      stop: see `specjax.Sampling`.
      constraint: see `specjax.Sampling`.
      ignore_eos: see `specjax.Sampling`.
      sampling: lines with other options.
    """

    temperature: float | None = option(None, "0 is greedy (default: 0)", metavar="T")
    top_k: int | None = option(None, "keep the K likeliest tokens; 0 is off (default: the model's, or 0)", metavar="K")
    top_p: float | None = option(
        None,
        "keep the fewest likeliest tokens with this total probability; 1 is off (default: the model's, or 1)",
        metavar="P",
    )
    max_new_tokens: int | None = option(None, f"most new tokens per prompt (default: {MAX_NEW_TOKENS})", metavar="N")
    seed: int = option(0, "decides the noise, with the prompt", metavar="N")
    stop: tuple[str, ...] = option((), "end the text before this string; may be repeated", metavar="STRING")
    constraint: str | None = option(
        None,
        "write only texts of a language: json:FILE or json:{...} (a JSON Schema), regex:..., choice:a|b, grammar:FILE or "
        "nested:FILE",
        metavar="LINE",
    )
    ignore_eos: bool = option(False, "continue after the end-of-sequence token")
    sampling: tuple[str, ...] = option(
        (), "OPTION=VALUE,...: other sampling options, see `specjax samplers`; may be repeated", metavar="LINE"
    )

    @property
    def of_prompts(self) -> Sampling:
        """The options of every prompt; flags take precedence over lines, as keywords do over `sampling` in Python.

        Raises:
          ValueError: on an unknown option, or one that is out of range.
        """
        own = [field for field in dataclasses.fields(PromptOptions) if field.name != "sampling"]
        usual: dict[str, Any] = {field.name: field.default for field in own}
        given = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        return Sampling(**{**usual, **read_sampling(self.sampling), **given})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all prompts of a run.

    Attributes:
      chat: whether a text prompt is a user's turn in the model's chat template.
      num_return_sequences: independent completions of each prompt, listed together; for a search, its best texts.
      select: selects one of these completions, by a line such as `"majority"` or `"borda:power=0.7"` (see
        `specjax searches`); None: all.
      batch_size: rows decoded together; changes speed, never text.
      shared_prefix: whether to prefill the common beginning of all prompts once, if it has at least 16 tokens.
      prefix_cache: how many bytes of read prompts are kept for prompts that begin equally, such as `"256MB"`; see
        `specjax.serve.prefix_cache`.
      logprobs: whether records carry log-probabilities of their tokens.
      prompt_logprobs: whether records carry log-probabilities of their prompts' tokens; every prompt is then read once
        more. For autoregressive models.
    """

    chat: bool = option(False, "treat each text as a user's turn in the model's chat template")
    num_return_sequences: int = option(
        1, "independent completions per prompt; for a search, its best texts", metavar="N", least=1
    )
    select: str | None = option(
        None,
        "take one of several completions: majority, self_certainty, borda, first_finish or reward, for example "
        "'majority:answer=\"is ([0-9]+)\"' (see `specjax searches`)",
        metavar="LINE",
    )
    batch_size: int = option(8, "rows decoded together; changes speed, never text", least=1)
    shared_prefix: bool = option(False, "prefill the common beginning of all prompts once")
    prefix_cache: str | None = option(
        None,
        "keep what was read of prompts in so much memory, such as 256MB, for prompts that begin equally",
        metavar="SIZE",
    )
    logprobs: bool = option(False, "add the log-probabilities of its tokens to each record")
    prompt_logprobs: bool = option(
        False, "add the log-probabilities of the prompt's tokens to each record; every prompt is read once more"
    )
