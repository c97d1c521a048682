"""The engines that a bench compares, and what they are asked."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from specjax import models
from specjax.assembly.assemble import DEFAULT_SAMPLER
from specjax.assembly.companions import Stored
from specjax.assembly.line import lines as lines_of
from specjax.assembly.registry import CACHES, DRAFTERS, OLDS, SAMPLERS, UNMASKS, build_drafter, make_unmask
from specjax.bench.options import BenchOptions
from specjax.diffusion.guided import Guided
from specjax.models.generation import left_out
from specjax.serve.engine import DEFAULT_MODEL, Engine
from specjax.serve.options import check_options
from specjax.sharding import make_mesh
from specjax.terminal import flag


def requests_of(
    options: BenchOptions, engines: dict[str, Any], texts: list[Any], suffixes: list[Any], skipped: list[str]
) -> dict[str, list[Any]]:
    """The requests of every engine that takes them, by its name; why another does not is added to `skipped`.

    Raises:
      ValueError: where the first engine takes them not, or a text would be longer than the model was made for.
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
    """Engines by name, and why a default drafter was left out; with `baseline` plain decoding is the first."""
    if options.adapter is not None and options.peer:
        raise ValueError("--adapter: other engines would read the model without it; convert the model with it first")
    if options.weights is not None and options.peer:
        raise ValueError("--weights: other engines would read the model as it is stored; leave --peer or --weights out")
    name = DEFAULT_MODEL if options.model is None else options.model
    how = {name: getattr(options, name) for name in ("adapter", "weights", "cache_dtype", "reduce_dtype")}
    model = models.load(name, options.dtype, make_mesh(options.mesh), **how)
    foreign = ("drafter", "peer") if model.masked else ("unmask", "block_length")
    foreign += ("cache",) if model.canvas else ()
    wrong = [name for name in foreign if getattr(options, name) not in (None, ())]
    if wrong:
        kind = "a diffusion" if model.masked else "an autoregressive"
        raise ValueError(f"{model.name} is {kind} model: {flag(wrong[0])} is not for it")
    make = _canvas_engines if model.canvas else _masked_engines if model.masked else _drafting_engines
    engines, skipped = make(options, model, baseline)
    sampled = bool(options.temperature)
    line = left_out(model, [name for name, value in options.of_prompts.items() if value is not None], sampled)
    return engines, skipped if line is None else [line, *skipped]


def _drafting_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    first = [("none", None)] if baseline else []
    wide = models.widen(model, options.widen or 1)
    engines, skipped = {}, []
    needed = ["none", *lines_of(options.drafter or [])]  # plain decoding takes every cache that the model does
    chosen = itertools.product(_every(options.drafter or ["all"], DRAFTERS), _every(options.cache, OLDS) or [None])
    for drafter, cache in dict.fromkeys([*first, *chosen]):
        name = drafter if cache is None else f"{drafter}/{cache}"
        try:
            engines[name] = Engine(wide, _drafter(drafter, model, options), cache=cache, mesh=options.mesh)
        except ValueError as error:
            if drafter in needed:
                raise
            skipped.append(f"left out {name}: {error}")
    return engines, skipped


def _drafter(line: str, model: Any, options: BenchOptions) -> Any:
    """A drafter's line, or what it says, widened as the model will be."""
    if options.widen is None:
        return line
    from specjax.draft.heads.widening import widen_head

    return widen_head(*build_drafter(line, model, mesh=make_mesh(options.mesh)), options.widen)


def _policy(line: str, model: Any, options: BenchOptions) -> Any:
    """An unmask policy's line, or what it says, loaded for the model as it is and widened as that will be."""
    policy = None if options.widen is None else make_unmask(line)
    if not isinstance(policy, Stored):
        return line
    loaded, params = policy.load(model, make_mesh(options.mesh))
    if isinstance(loaded, Guided):
        guide = models.widen(models.Model(loaded.guide, params, name=policy.found(model)), options.widen or 1)
        loaded, params = dataclasses.replace(loaded, guide=guide.lm), guide.params
    return loaded, dict.fromkeys(loaded.needs, params)


def _masked_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    chosen = [
        (unmask, cache)
        for unmask in _every(options.unmask or ["threshold"], UNMASKS)
        for cache in _every(options.cache or ["none", "prefix", "dual"], CACHES)
    ]
    first = [("fixed", "none")] if baseline else []
    wide = models.widen(model, options.widen or 1)
    engines, skipped = {}, []
    failed: dict[str, ValueError] = {}
    for unmask, cache in dict.fromkeys([*first, *chosen]):
        try:
            engines[f"{unmask}/{cache}"] = Engine(
                wide,
                unmask=_policy(unmask, model, options),
                cache=cache,
                block_length=options.block_length,
                mesh=options.mesh,
            )
        except ValueError as error:
            if options.cache and "all" not in [*options.cache, *(options.unmask or [])]:
                raise
            skipped.append(f"left out {unmask}/{cache}: {error}")
            failed.setdefault(unmask, error)
    useless = [error for unmask, error in failed.items() if not any(name.startswith(f"{unmask}/") for name in engines)]
    if useless and (not engines or "all" not in (options.unmask or [])):
        raise useless[0]
    return engines, skipped


def _canvas_engines(options: BenchOptions, model: Any, baseline: bool) -> tuple[dict[str, Any], list[str]]:
    """The sampler as published, and those that were asked for: such a model has no mask, and no choice of caches."""
    wide = model if options.widen is None else models.widen(model, options.widen)
    named = _every(options.unmask, SAMPLERS)
    first = [DEFAULT_SAMPLER] if baseline or not named else []
    make = lambda line: Engine(wide, unmask=line, block_length=options.block_length, mesh=options.mesh)
    return {line: make(line) for line in dict.fromkeys([*first, *named])}, []


def _every(lines: Sequence[str], table: dict[str, Any]) -> list[str]:
    return [name for line in lines_of(lines) for name in (table if line == "all" else [line])]
