"""The engines that a bench compares, and their requests."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from specjax import models
from specjax.assembly.companions import Stored
from specjax.assembly.line import line_of
from specjax.assembly.line import lines as lines_of
from specjax.assembly.registry import (
    DRAFTERS,
    SAMPLERS,
    UNMASKS,
    build_drafter,
    build_verifier,
    make_unmask,
    tree_of,
)
from specjax.bench.options import BenchOptions
from specjax.decode import Decode, Diffusion, Speculate
from specjax.decode.diffusion import DEFAULT_SAMPLER
from specjax.decode.lines import decode_of, read_decode
from specjax.diffusion.guided import Guided
from specjax.models.generation import left_out
from specjax.serve.engine import Engine
from specjax.serve.sampling import check_options
from specjax.sharding import make_mesh
from specjax.terminal import flag


def requests_of(
    options: BenchOptions, engines: dict[str, Any], texts: list[Any], suffixes: list[Any], skipped: list[str]
) -> dict[str, list[Any]]:
    """The requests of every engine that accepts them, by its name. The reasons of the others are added to `skipped`.

    Raises:
      ValueError: if the first engine does not accept them, or a text would be longer than the model allows.
    """
    check_options(options.of_prompts)
    found: dict[str, list[Any]] = {}
    for name, engine in engines.items():
        try:
            found[name] = [
                engine.request(text, suffix=after, **options.of_prompts)
                for text, after in zip(texts, suffixes, strict=True)
            ]
        except ValueError as error:
            if not found:
                raise
            skipped.append(f"left out {name}: {error}")
    plain = next(iter(engines.values()))
    for number, request in enumerate(next(iter(found.values())), start=1):
        if len(request.ids) + options.new_tokens > plain.max_length:
            raise ValueError(
                f"prompt {number} has {len(request.ids)} tokens: with {options.new_tokens} new ones it is longer than "
                f"the {plain.max_length} that {plain.model.name} was made for; lower --max-new-tokens"
            )
    return found


def engines_of(options: BenchOptions, baseline: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Engines by name, and the reasons for omitted default drafters. With `baseline`, plain decoding is the first."""
    if options.adapter and options.peer:
        raise ValueError("--adapter: other engines would read the model without it; convert the model with it first")
    if options.weights is not None and options.peer:
        raise ValueError("--weights: other engines would read the model as it is stored; leave --peer or --weights out")
    how = {name: getattr(options, name) for name in ("adapter", "weights", "cache_dtype", "reduce_dtype")}
    model = models.load(options.model, options.dtype, make_mesh(options.mesh), **how)
    wrong = [name for name in ("drafter", "peer") if model.masked and getattr(options, name)]
    if wrong:
        raise ValueError(f"{model.name} is {model.kind}: {flag(wrong[0])} is not for it")
    makes = ((model.canvas, _canvas_engines), (model.any_subset, _gap_engines), (model.masked, _masked_engines))
    make = next((make for suits, make in makes if suits), _drafting_engines)
    engines, skipped = make(options, model, baseline)
    sampled = bool(options.temperature)
    line = left_out(model, [name for name, value in options.of_prompts.items() if value is not None], sampled)
    return engines, skipped if line is None else [line, *skipped]


def _drafting_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    first = ["none"] if baseline else []
    for line in lines_of(options.drafter):
        _ = line == "all" or decode_of(None, line)  # a drafter's line, or an error
    asked = [*options.drafter, *options.decode] or ["all"]
    return _made(options, model, dict.fromkeys([*first, *_every(asked, list(DRAFTERS))]), ["none", *lines_of(asked)])


def _masked_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    caches = ("none", "prefix", "dual")
    with_caches = lambda name: [f"{name}:cache={cache}" for cache in caches]
    asked = options.decode or with_caches("threshold")
    every = [line for name in UNMASKS for line in with_caches(name)]
    first = [_fixed(lines_of(asked))] if baseline else []
    engines, skipped = _made(
        options, model, dict.fromkeys([*first, *_every(asked, every)]), [*first, *lines_of(options.decode)]
    )
    if not engines:
        raise ValueError(skipped[0])
    return engines, skipped


def _fixed(lines: Sequence[str]) -> str:
    """The line of plain diffusion decoding, with the other settings of the first line."""
    own = next(
        (way for way in map(read_decode, (line for line in lines if line != "all")) if isinstance(way, Diffusion)), None
    )
    usual = vars(Diffusion())
    more = {} if own is None else {name: value for name, value in vars(own).items() if value != usual[name]}
    more = {name: value for name, value in more.items() if name not in ("unmask", "cache")}
    return line_of({"name": "fixed", "cache": "none", **more})


def _gap_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    """Of an any-subset model: one position per pass, and the requested ways or both that draft."""
    named = options.decode or ["assd", "assd:drafter=context_ngram"]
    lines = dict.fromkeys([*(["assd:drafts=1"] if baseline else []), *_every(named, named)])
    return _made(options, model, lines, lines)


def _canvas_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    """The published sampler, and the requested ones. Such a model has no mask and no choice of caches."""
    named = _every(options.decode, list(SAMPLERS))
    first = [DEFAULT_SAMPLER] if baseline or not named else []
    lines = dict.fromkeys([*first, *named])
    return _made(options, model, lines, lines)


def _made(
    options: BenchOptions, model: Any, lines: Iterable[str], needed: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """An engine per line, and the reasons for omitted ones that were not requested by name."""
    wide, needed = models.widen(model, options.widen) if options.widen else model, set(needed)
    engines, skipped = {}, []
    for line in lines:
        try:
            engines[line] = Engine(wide, _widened(read_decode(line), model, options), mesh=options.mesh)
        except ValueError as error:
            if line in needed:
                raise
            skipped.append(f"left out {line}: {error}")
    return engines, skipped


def _widened(way: Decode, model: Any, options: BenchOptions) -> Decode:
    """A way to decode whose drafter or policy is loaded for the original model and widened like the model."""
    if options.widen is None:
        return way
    if isinstance(way, Speculate):
        from specjax.draft.heads.widening import widen_head

        tree = tree_of(build_verifier(way.verifier, model)[0])
        drafter = build_drafter(way.drafter or "none", model, mesh=make_mesh(options.mesh), tree=tree)
        return dataclasses.replace(way, drafter=widen_head(*drafter, options.widen))
    if not isinstance(way, Diffusion) or not isinstance(policy := make_unmask(way.unmask or "threshold"), Stored):
        return way
    loaded, params = policy.load(model, make_mesh(options.mesh))
    if isinstance(loaded, Guided):
        guide = models.widen(models.Model(loaded.guide, params, name=policy.found(model)), options.widen)
        loaded, params = dataclasses.replace(loaded, guide=guide.lm), guide.params
    return dataclasses.replace(way, unmask=(loaded, dict.fromkeys(loaded.needs, params)))


def _every(lines: Sequence[str], every: Sequence[str]) -> list[str]:
    return [name for line in lines_of(lines) for name in (every if line == "all" else [line])]
