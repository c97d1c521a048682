"""What a job is to do: its engine, its items, and the manifest that says whether another run is the same job."""

import dataclasses
import json
from typing import Any, Protocol

from specjax.jobs import jsonl
from specjax.jobs.manifest import fingerprint, hash_json, named_folders
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item
from specjax.models import generation
from specjax.sampling_params import FIELDS, USUAL, is_set
from specjax.serve.engine import Engine
from specjax.serve.options import MAX_NEW_TOKENS, DecodeOptions, check_options, take
from specjax.serve.request import Record, Request, several
from specjax.serve.selecting import Chooser
from specjax.serve.text import user_turn

_DECODING = ("drafter", "verifier", "unmask", "cache", "block_length", "cfg_scale")
_LATER = (
    "longest",
    "sub_block",
    "align",
    "shift",
    "filter",
    "logits_eos_inf",
    "confidence_eos_eot_inf",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "length_penalty",
    "early_stopping",
    "stochastic_beams",
    "superposed_drafts",
    "superposed_tokens",
    "superposed_temperature",
    "superposed_alpha",
    "superposed_ngrams",
    "soft_thinking",
    "end_of_think",
)
"""Settings that are left out at their defaults, as older manifests did not have them."""


class FromLines(Protocol):
    """Options of a command that reads lines.

    Attributes:
      input: the file.
      strict: whether a bad line ends the job.
    """

    @property
    def input(self) -> str | None: ...

    @property
    def strict(self) -> bool: ...


def make_engine(options: JobOptions, texts: int) -> Engine:
    """The engine of a job of so many prompts.

    Raises:
      ValueError: where its options cannot be used.
    """
    check_options(options.given)
    chooser = Chooser.of(options, options.logprobs)
    decode = take(DecodeOptions, vars(options))
    rows = min(options.batch_size, texts * options.num_return_sequences)
    engine = Engine(**vars(decode if chooser is None else chooser.kept_by(decode)), rows=rows)
    engine.check_stop(options.stop)
    engine.check_completions(options.num_return_sequences)
    if options.prompt_logprobs:
        engine.reader()  # refuses a diffusion model
    return engine


def make_items(options: JobOptions, engine: Engine, given: list[Any]) -> list[Item]:
    """What is to be completed: a request for every line or prompt that can become one, and a failed record for the others.

    Raises:
      ValueError: where no line can, or with `strict` where one cannot.
    """
    defaults = options.given
    if not options.input:
        items: list[Item] = [
            engine.request(user_turn(prompt, options.chat), suffix=options.suffix, **defaults) for prompt in given
        ]
    else:
        lines = [dataclasses.replace(line, prompt=user_turn(line.prompt, options.chat)) for line in given]
        items = list(jsonl.to_requests(lines, engine, defaults))
        check_lines(options, [(item.line, item.error) for item in items if isinstance(item, Record)], len(items))
    if (chooser := Chooser.of(options, options.logprobs)) is not None:
        chooser.check(engine, [item for item in items if isinstance(item, Request)])
        return items
    return [one for item in items for one in several(item, options.num_return_sequences)]


def check_lines(options: FromLines, bad: list[tuple[int | None, str | None]], count: int) -> None:
    """Raises ValueError where none of `count` lines can be used, or with `strict` where one cannot."""
    if bad and options.strict:
        raise ValueError(f"{options.input}, line {bad[0][0]}: {bad[0][1]}")
    if len(bad) == count:
        why = f"; line {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise ValueError(f"the input file {options.input!r} has no valid line{why}")


def make_manifest(options: JobOptions, engine: Engine, given: list[Any]) -> dict[str, Any]:
    """What must be equal for a job to go on. Batch size and mesh change no text."""
    decoding = {name: getattr(options, name) for name in _DECODING}
    # with a shared prefix programs have other shapes, and near-ties may fall otherwise
    shared = {"shared_prefix": True} if options.shared_prefix else {}
    prompts = {"prompt_logprobs": True} if options.prompt_logprobs else {}
    chat = {"chat": True} if options.chat else {}
    select = {"select": options.select, "answer": options.answer} if options.select is not None else {}
    usual_plan = {name: DecodeOptions.__dataclass_fields__[name].default for name in _LATER}
    later = {name: getattr(options, name) for name in _LATER if getattr(options, name) != usual_plan[name]}
    stores = {"learn2pd:model": options.filter, "rest:datastore": options.superposed_ngrams}
    stored = [f"{field}={folder}" for field, folder in stores.items() if folder is not None]
    usual = [name for name, _ in USUAL]  # the others were left out of older manifests
    every = {name: field.default for name, field in FIELDS.items()} | {"max_new_tokens": MAX_NEW_TOKENS}
    every |= generation.defaults(engine.model) | options.given
    rare = {name: every[name] for name in FIELDS if name not in usual and is_set(name, every[name])}
    run = ("ignore_eos", "num_return_sequences", "logprobs", "suffix")
    return {
        "version": 1,
        "model": _model(engine),
        "decoding": decoding | shared | chat | later | select,
        "folders": named_folders([*decoding.values(), *stored]),
        "sampling": {name: every[name] for name in ("max_new_tokens", *usual)}
        | json.loads(json.dumps(rare))
        | {"stop": list(options.stop)}
        | {name: getattr(options, name) for name in run}
        | prompts,
        "seed": options.seed,
        "input": _input(given),
        "output": {"order": "as finished" if options.unordered else "of the input"},
    }


def score_manifest(engine: Engine, given: list[Any]) -> dict[str, Any]:
    """The same of `specjax score`."""
    return {"version": 1, "command": "score", "model": _model(engine), "input": _input(given)}


def _model(engine: Engine) -> dict[str, Any]:
    model = engine.model
    assert model.path is not None  # a command's model is read from a folder
    added = {} if model.adapter is None else {"adapter": fingerprint(model.adapter)}
    added |= {} if model.weights is None else {"weights": model.weights}
    added |= {} if model.cache_dtype is None else {"cache_dtype": model.cache_dtype}
    added |= {} if model.reduce_dtype is None else {"reduce_dtype": model.reduce_dtype}
    return {"name": model.name, "fingerprint": fingerprint(model.path), "dtype": model.dtype_name} | added


def _input(given: list[Any]) -> dict[str, Any]:
    return {"sha256": hash_json(plain(given)), "records": len(given)}


def plain(given: list[Any]) -> list[Any]:
    """Lines or prompts as JSON."""
    return [dataclasses.asdict(line) if isinstance(line, jsonl.Line) else line for line in given]
