"""The decoders that answer: the one that was asked for, and those to compare with it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax import models
from specjax.assembly.line import settings
from specjax.decode.diffusion import usual_unmask
from specjax.evaluate.divergence import check_way
from specjax.evaluate.options import DecoderOptions, EvalOptions
from specjax.names import WITHIN, hint
from specjax.serve.engine import Engine
from specjax.serve.options import DecodeOptions, PromptOptions, check_least, take
from specjax.serve.selecting import Chooser
from specjax.sharding import make_mesh
from specjax.terminal import BadInput, Parser, add_fields, flag, from_args

OPTIONS = {field.name: field for field in dataclasses.fields(DecoderOptions) if not field.metadata.get("hidden")}
"""The options in which two decoders may differ."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """An engine and the options of its prompts.

    Attributes:
      name: the line by which it was chosen.
      engine: ready to answer.
      options: of its prompts.
      chooser: selects the answer from several completions; None: there is only one.
    """

    name: str
    engine: Engine
    options: DecoderOptions
    chooser: Chooser | None = None

    @property
    def of_prompts(self) -> dict[str, Any]:
        """Options of every prompt."""
        return self.options.of_prompts.given


def decoders_of(options: EvalOptions) -> list[Decoder]:
    """Decoders with distinct names; the others are compared with the first.

    Raises:
      ValueError: one line that says what cannot be used.
    """
    base = take(DecoderOptions, vars(options))
    lines = dict.fromkeys(text.strip() for text in options.compare)
    chosen = [base, *(changed(base, line) for line in lines)]
    for own in chosen:
        check_least(own)
        _ = own.of_prompts, own.way  # errors in them are reported before a model is loaded
    if options.trust:
        for name, own in zip(("the first decoder", *lines), chosen, strict=True):
            check_way(own.way, name)
    choosers = [_chooser(own, options) for own in chosen]
    if options.samples > 1 and not options.temperature:
        raise ValueError(
            "several samples of a greedy answer are all the same: set a temperature, or ask for one sample"
        )
    keeps = [
        options.uncertainty or options.trust or chooser is not None and chooser.selection.reads_certainty
        for chooser in choosers
    ]
    engines = _engines(chosen, keeps, options.batch_size)
    names = [_named(base, engines[0]), *lines]
    if len(set(names)) < len(names):
        raise ValueError(f"compare names {names[0]!r}, the decoder that the others are compared with: leave it out")
    return [Decoder(*parts) for parts in zip(names, engines, chosen, choosers, strict=True)]


def _chooser(own: DecoderOptions, options: EvalOptions) -> Chooser | None:
    """The selection among a decoder's completions; None if it writes one answer."""
    chooser = Chooser.of(own.select, own.num_return_sequences)
    if chooser is None and own.num_return_sequences > 1:
        raise ValueError(
            "num_return_sequences is for select, which takes one of the completions: give select, or samples instead"
        )
    if chooser is not None and options.samples > 1:
        raise ValueError("select gives one answer to a question: leave samples out, or leave select out")
    return chooser


def changed(base: DecoderOptions, line: str) -> DecoderOptions:
    """Options changed as a line says. If the line names another model, it keeps only methods that the line names.

    Raises:
      ValueError: on an unknown option or an invalid value.
    """
    given = {name.lstrip("-").replace("-", "_"): value for name, value in settings(line).items()}
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        moved = hint(unknown[0], {name: name for name in OPTIONS}) if unknown[0] in WITHIN else ""
        said = moved or f"choose {', '.join(OPTIONS)}"
        raise ValueError(f"compare {line!r}: there is no option {unknown[0]!r}; {said}")
    parser = Parser(prog="specjax eval")
    add_fields(parser, DecoderOptions)
    try:
        found = from_args(DecoderOptions, parser.parse_args([word for pair in given.items() for word in _words(*pair)]))
    except BadInput as error:
        raise ValueError(f"compare {line!r}: {error}") from error
    ways = [field.name for field in dataclasses.fields(DecodeOptions)]
    fresh: dict[str, Any] = dict.fromkeys(ways) if {"model", *ways} & given.keys() else {}
    return dataclasses.replace(base, **(fresh | {name: getattr(found, name) for name in given}))


def _words(name: str, value: str) -> list[str]:
    """An option written as a flag."""
    if OPTIONS[name].type is not bool:
        return [f"{flag(name)}={value}"]
    if value not in ("true", "false"):
        raise BadInput(f"{name} must be true or false, got {value!r}")
    return [flag(name)] if value == "true" else []


def _engines(chosen: Sequence[DecoderOptions], keeps: Sequence[bool], rows: int) -> list[Engine]:
    """An engine for each; engines of one model share its parameters."""
    loaded: dict[Any, Any] = {}
    engines = []
    for own, logprobs in zip(chosen, keeps, strict=True):
        how: dict[str, Any] = own.of_model
        how["mesh"] = mesh = make_mesh(own.mesh)
        given = how.pop("model")
        key = tuple(map(str, own.of_model.values())), given if given is None or isinstance(given, str) else id(given)
        if key not in loaded:
            loaded[key] = models.load(given, **how)
        engines.append(Engine(loaded[key], own.way, mesh=mesh, logprobs=logprobs, rows=rows))
    return engines


def _named(own: DecoderOptions, engine: Engine) -> str:
    """A decoder's differences from the defaults, or its method if there are none."""
    fields = [*dataclasses.fields(DecodeOptions), *dataclasses.fields(PromptOptions)]
    fields += [OPTIONS[name] for name in ("num_return_sequences", "select", "task_constraint")]
    shown = {
        field.name: getattr(own, field.name) for field in fields if field.name not in ("seed", "stop", "max_new_tokens")
    }
    words = [
        f"{field.name}={_spelt(shown[field.name])}"
        for field in fields
        if shown.get(field.name) not in (None, field.default)
    ]
    if words:
        return ";".join(words)
    if engine.model.any_subset:
        return "decode=assd"
    if engine.model.masked:
        return f"decode={usual_unmask(engine.model)}"
    return f"drafter={engine.drafter}"


def _spelt(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
