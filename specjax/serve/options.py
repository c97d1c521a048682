"""Options of decoding, each written once: flags, fields of input lines and manifests come from these fields.

A field's metadata says what it does (`help`), its `least` value, and how it reads on a command line (`metavar`, `choices`,
`nargs`, `positional`, or `hidden`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from specjax.decode import Decode
from specjax.decode.lines import decode_of
from specjax.decode.speculate import DEFAULT_DRAFTER
from specjax.serve.sampling import MAX_NEW_TOKENS, Sampling, read_sampling

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


def check_least(options: Any, spell: Callable[[str], str] = str) -> None:
    """Raises ValueError where a field is below its `least`; `spell` turns its name into what the user wrote."""
    for field in dataclasses.fields(options):
        value, least = getattr(options, field.name), field.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ValueError(f"{spell(field.name)} must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model and how it is loaded: the arguments of `specjax.load`.

    Attributes:
      model: a folder, a GGUF file, a shipped name or hub id, or None for the shipped target.
      dtype: of the parameters.
      mesh: a line such as `"data=2,model=4"`.
      adapter: the folder of a PEFT LoRA adapter, or its hub id.
      longest: how many positions the model is used for.
      weights: a format that the model's matrices are kept in, such as "int8" or "int4:group=32".
      cache_dtype: the type of its caches, such as "int8" or "float8_e4m3fn".
      reduce_dtype: in which products are summed over a mesh, such as "bfloat16".
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
        ",vocab=true: embeddings and head too; packed: as the file has them; plain (default: packed, on a CPU plain)",
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
        "NAME:FIELD=VALUE,...: a search, a policy of a diffusion model, or another way; see `specjax searches` and `specjax "
        "policies` (default: the usual drafter, or the model's own policy)",
        metavar="LINE",
    )
    drafter: Any = option(
        None,
        "NAME:FIELD=VALUE,...,verifier=NAME; see `specjax drafters` and `specjax verifiers`; a+b fuses two (default: "
        f"{DEFAULT_DRAFTER}; for several rows on a CPU draft where one is shipped, else none)",
        metavar="LINE",
    )

    @property
    def way(self) -> Decode | None:
        """The way to decode that they say; None where they leave it open.

        Raises:
          ValueError: see `specjax.decode.lines.decode_of`.
        """
        return decode_of(self.decode, self.drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of prompts, as flags.

    Attributes:
      temperature: see `specjax.Sampling`.
      top_k: likewise.
      top_p: likewise.
      max_new_tokens: likewise.
      seed: likewise.
      stop: likewise.
      ignore_eos: likewise.
      sampling: lines of the others.
    """

    temperature: float | None = option(None, "0 is greedy (default: 0)", metavar="T")
    top_k: int | None = option(
        None, "keep the k likeliest tokens; 0 is off (default: the model's, else 0)", metavar="K"
    )
    top_p: float | None = option(
        None, "keep the smallest likeliest set of this mass; 1 is off (default: the model's, else 1)", metavar="P"
    )
    max_new_tokens: int | None = option(None, f"new tokens a prompt, at most (default: {MAX_NEW_TOKENS})", metavar="N")
    seed: int = option(0, "with the prompt it decides the noise", metavar="N")
    stop: tuple[str, ...] = option((), "ends a text and is left out; may be repeated", metavar="STRING")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    sampling: tuple[str, ...] = option(
        (), "OPTION=VALUE,...: other options of prompts, see `specjax samplers`; may be repeated", metavar="LINE"
    )

    @property
    def of_prompts(self) -> Sampling:
        """The options of every prompt; flags take precedence over lines, as keywords do over `sampling` in Python.

        Raises:
          ValueError: on one that there is not or that is out of range.
        """
        own = [field for field in dataclasses.fields(PromptOptions) if field.name != "sampling"]
        usual: dict[str, Any] = {field.name: field.default for field in own}
        given = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        return Sampling(**{**usual, **read_sampling(self.sampling), **given})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all prompts of a run.

    Attributes:
      chat: whether a prompt that is a text is a user's turn of the model's chat template.
      num_return_sequences: independent completions of each prompt, one after the other; of a search its best texts.
      select: takes one of these completions, a line such as `"majority"` or `"borda:power=0.7"`, see `specjax searches`; None:
        all.
      batch_size: rows decoded together; changes speed, never text.
      shared_prefix: whether to prefill what all prompts begin with once, where that is 16 tokens or more.
      logprobs: whether records carry log-probabilities of their tokens.
      prompt_logprobs: whether records carry log-probabilities of their prompts' tokens, for which every prompt is read once
        more; of an autoregressive model.
    """

    chat: bool = option(False, "a text is a user's turn of the model's chat template, which the model answers")
    num_return_sequences: int = option(
        1, "independent completions of each prompt; of a search its best texts", metavar="N", least=1
    )
    select: str | None = option(
        None,
        "take one of them: majority, self_certainty, borda or first_finish, such as 'majority:answer=\"is ([0-9]+)\"' (see "
        "`specjax searches`)",
        metavar="LINE",
    )
    batch_size: int = option(8, "rows decoded together; changes speed, never text", least=1)
    shared_prefix: bool = option(False, "prefill what all prompts begin with once")
    logprobs: bool = option(False, "records carry log-probabilities of their tokens")
    prompt_logprobs: bool = option(
        False, "records carry log-probabilities of their prompts' tokens, which are read once more for it"
    )
