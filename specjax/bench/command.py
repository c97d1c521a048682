"""`specjax bench`: compares plain decoding, drafters and peers over the same prompts.

It also has the suites `parallel`, `order`, `profile`, `schema`, `spec` and `tree`."""

from typing import Any

import jax

from specjax.bench import order, parallel_run, profile, schema_run, spec_run, tree
from specjax.bench import report as reporting
from specjax.bench.engines import engines_of, requests_of
from specjax.bench.options import BenchOptions
from specjax.bench.peers import PEERS, peers_of
from specjax.bench.prompts import prompts_of, read_input
from specjax.bench.run import Contestant, Ours, Theirs, measure, progress, summarise
from specjax.bench.weights_read import weights_read
from specjax.jobs import jsonl
from specjax.models import DEFAULT_MODEL
from specjax.serve.options import check_least
from specjax.speculative import Speculative
from specjax.terminal import bad_input, flag, note, write
from specjax.viz.files import check_plot


def command(options: BenchOptions) -> int:
    """Runs the bench; returns the exit status."""
    with bad_input():
        check_suite(options)
    if options.suite != "speed":
        suites = {"parallel": parallel_run, "order": order, "profile": profile, "schema": schema_run, "spec": spec_run}
        return {**suites, "tree": tree}[options.suite].command(options)
    with bad_input():
        contestants, peers, about, skipped = prepare(options)
    for reason in skipped:
        note(reason)
    with progress(len(contestants) * (options.repeats + 1)) as advance:
        laps = measure(contestants, options.repeats, advance)
    report = summarise(laps, peers, about, bool(options.temperature), weights_of(contestants))
    if options.json:
        said = {} if options.widen is None else {"about": report.about}
        write(jsonl.dumps(report.to_json() | said) + "\n")
    else:
        reporting.table(report)
    if options.plot:
        reporting.plot(report, options.plot)
    return 0


def check_suite(options: BenchOptions) -> None:
    """Raises ValueError on an option of another suite, or a count below 1."""
    peers, plots, schemas = (
        ("peer", "widen"),
        ("plot",),
        ("compare", "kind", "coverage", "alone", "compile_limit", "text_limit"),
    )
    foreign = {
        "parallel": ("input", "answers", "ignore_eos", *plots, *peers, *schemas),
        "order": ("tasks", "answers", "ignore_eos", "beside", *peers, *schemas),
        "profile": ("answers", "peer", "ignore_eos", "beside", *schemas),
        "schema": ("tasks", "answers", "peer", "ignore_eos", "beside", *plots),
        "spec": ("tasks", "ignore_eos", "beside", *plots, *schemas),
        "tree": ("answers", "beside", *plots, *peers, *schemas),
        "speed": ("answers", "beside", *schemas),
    }[options.suite]
    wrong = [name for name in foreign if getattr(options, name) not in (None, (), False)]
    if wrong:
        raise ValueError(f"{flag(wrong[0])} is not for the suite {options.suite}")
    check_least(options, flag)


def prepare(options: BenchOptions) -> tuple[dict[str, Contestant], dict[str, tuple[str, str]], str, list[str]]:
    """Contestants by name, which of them are peers, the setting in words, and the reasons for omitted default drafters.

    Raises:
      ValueError: on unusable options or prompts.
    """
    asked = peers_of(options)
    if options.plot:
        check_plot(options.plot)
    lines = read_input(options)
    engines, skipped = engines_of(options)
    plain = next(iter(engines.values()))
    texts, suffixes = prompts_of(lines, options, plain.model)
    of_engines = requests_of(options, engines, texts, suffixes, skipped)
    requests = next(iter(of_engines.values()))
    contestants: dict[str, Contestant] = {
        name: Ours(engines[name], own, options.batch_size, engines[name].capacity(own), options.ignore_eos)
        for name, own in of_engines.items()
    }
    peers: dict[str, tuple[str, str]] = {}
    longest = max(len(request.ids) + request.max_new_tokens for request in requests)
    for peer in asked:
        for mode, model in PEERS[peer](options, engines, longest).items():
            contestants[f"{peer} {mode}"] = Theirs(model, requests, options.batch_size)
            peers[f"{peer} {mode}"] = (peer, mode)
    drawn = f"temperature {options.temperature:g}, seed {options.seed}" if options.temperature else "greedy"
    about = (
        f"{_named(plain.model, options)}, {plain.model.dtype.name}, {len(requests)} prompts x {_most(options)} tokens, "
        f"{drawn}, batch {options.batch_size}, median of {options.repeats}"
    )
    return contestants, peers, about, skipped


def weights_of(contestants: dict[str, Contestant]) -> dict[str, float]:
    """Bytes of weights that a step of our speculative decoders reads, by name, as far as they are known."""
    engines = {name: one.engine for name, one in contestants.items() if isinstance(one, Ours)}
    found = {
        name: weights_read(engine.decoder, engine.params)
        for name, engine in engines.items()
        if isinstance(engine.decoder, Speculative)
    }
    return {name: read for name, read in found.items() if read}


def _most(options: BenchOptions) -> str:
    return f"{'' if options.ignore_eos else 'up to '}{options.new_tokens}"


def _named(model: Any, options: BenchOptions) -> str:
    """The model's name; for a widened one, its size and the model whose text it writes."""
    if options.widen is None:
        return model.name
    millions = sum(x.size for x in jax.tree.leaves(model.params)) / 1e6
    return f"{model.name}: {millions:.1f} M parameters, the text of {options.model or DEFAULT_MODEL}"
