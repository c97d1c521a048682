"""`specjax train evopress`: searches which sublayers to leave out, how many bits each matrix gets, or how many tokens each
layer's cache keeps (arXiv:2410.14649)."""

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models, programs
from specjax.assembly.line import extended, spelt
from specjax.assembly.registry import make_old
from specjax.models import DEFAULT_MODEL
from specjax.models.caches import EMS
from specjax.models.caches.base import kept_layers
from specjax.models.drop_config import read_drops, write_drops
from specjax.models.few_bits import is_quantised, plain
from specjax.models.formats import BITS, matrices, matrix_name, read_format
from specjax.models.on_disk import replace
from specjax.serve.options import check_least
from specjax.serve.record_bar import bar_fits
from specjax.settings import settled
from specjax.sharding import make_mesh
from specjax.terminal import bad_input, flag, note
from specjax.train import data, prompts
from specjax.train.evopress.budgets import CacheDivergence, conversations
from specjax.train.evopress.fitness import Compress, Divergence
from specjax.train.evopress.population import Candidate, Drops, Evolution, Generation, Levels, Stage, check_rounds, cuts
from specjax.train.options import CACHE, DROPS, EvopressOptions, length_of
from specjax.train.task import check_encoder, check_plain


@dataclasses.dataclass(frozen=True)
class Published:
    """The settings of EvoPress' scripts.

    Attributes:
      budget: the share of layers that lose a part, or bits of a number.
      offspring: children of a generation.
      survivors: of each round.
      tokens: of each round.
      initial: random candidates to begin with, and tokens that each reads.
    """

    budget: float
    offspring: int
    survivors: tuple[int, ...]
    tokens: tuple[int, ...]
    initial: tuple[int, int] = (64, 2048)


PUBLISHED = {
    DROPS: Published(0.25, 32, (2, 1), (2048, 32768)),
    "bits": Published(6.0, 128, (16, 4, 1), (2048, 16384, 131072)),
    CACHE: Published(256, 32, (4, 1), (2048, 16384)),
}
"""By what is searched. The budget in bits is ours, halfway between int4 and int8; theirs are for codes of 2 to 4 bits. They
search no caches: those settings are ours."""


@dataclasses.dataclass(frozen=True)
class Search:
    """A search, ready to run.

    Attributes:
      evolution: see `Evolution`.
      generations: how many.
      about: what is searched, in words.
      write: writes a candidate to the output.
    """

    evolution: Evolution
    generations: int
    about: str
    write: Callable[[Candidate], None]


def command(options: EvopressOptions) -> int:
    """`specjax train evopress`."""
    programs.keep()
    try:
        with bad_input():
            search = _prepared(options)
            begun = search.evolution.run(random.Random(options.seed))
            first = next(begun)
    except prompts.Stopped as stopped:
        return stopped.status
    note(f"{search.about}; {search.generations} generations of {options_of(options).offspring} children")
    last = first
    with _progress(search.generations) as advance:
        for last in itertools.islice(begun, search.generations):
            search.write(last.population[0])
            advance(last.fitness[0])
    note(f"{last.read} tokens were read; {compared(search.evolution, first, last)}")
    note(f"written to {options.output}; use it with {_use(options)}")
    return 0


def compared(evolution: Evolution, first: Generation, last: Generation) -> str:
    """The fitness of the start and of the end, both on the same tokens: the last round's of another draw."""
    chosen = cuts(random.Random(0), evolution.lengths, evolution.stages[-1].tokens)
    before, after = evolution.fitness([first.population[0], last.population[0]], chosen)
    return f"on the same {evolution.stages[-1].tokens} tokens, {before:.5f} at the start and {after:.5f} as written"


def options_of(options: EvopressOptions) -> Published:
    """The settings, as asked or published."""
    usual = PUBLISHED[options.what]
    own = lambda asked, published: published if asked in (None, ()) else asked
    return Published(
        own(options.budget, usual.budget), own(options.offspring, usual.offspring),
        own(options.survivors, usual.survivors), own(options.tokens, usual.tokens),
        (own(options.initial, usual.initial[0]), own(options.initial_tokens, usual.initial[1])),
    )  # fmt: skip


@settled
def _prepared(options: EvopressOptions) -> Search:
    """The search.

    Raises:
      ValueError: on anything unusable, before the target writes.
    """
    check_least(options, flag)
    prompts.check_sources(options)
    for name in {DROPS: ("levels", "group", "cache"), "bits": ("legal", "cache"), CACHE: ("legal", "group")}[
        options.what
    ]:
        if getattr(options, name) not in (None, ()):
            raise ValueError(f"{flag(name)} is not for a search of {options.what}")
    if options.what == CACHE and options.fitness == "perplexity":
        raise ValueError("--fitness perplexity is of texts, and a cache is searched by divergence: kl or sparse_kl")
    if options.top_k is not None and options.fitness != "sparse_kl":
        raise ValueError(f"--top-k is for --fitness sparse_kl, not for {options.fitness}")
    output = Path(options.output)
    if output.is_dir():
        raise ValueError(f"--output {options.output!r} is a folder; give a file")
    how = options_of(options)
    if len(how.survivors) != len(how.tokens):
        raise ValueError(
            f"--survivors and --tokens have a number for each round of selection, not {len(how.survivors)} and "
            f"{len(how.tokens)}"
        )
    target = models.load(options.target or DEFAULT_MODEL, dtype=options.dtype, mesh=make_mesh(options.mesh))
    check_encoder(target, "text", "evopress")
    check_plain("evopress", target)
    if target.masked is not None or not isinstance(target.lm, models.LlamaLM):
        kind = "a diffusion model" if target.masked is not None else f"a {type(target.lm).__name__}"
        raise ValueError(
            f"evopress compresses autoregressive models of this library's parts, and {target.name} is {kind}"
        )
    space, measured, about, write = {DROPS: _drops, "bits": _bits, CACHE: _cache}[options.what](options, target, how)
    stages = tuple(map(Stage, how.survivors, how.tokens))
    check_rounds(space, how.offspring, stages, how.initial)
    folder = output.parent / f"{output.name}-training"
    rows = data.read_rows(prompts.written(options, target, folder), target, length_of(options), options.seed)
    fitness = measured(rows)
    evolution = Evolution(space, fitness.lengths, fitness, how.offspring, stages, how.initial)
    generations = space.generations if options.generations is None else options.generations
    return Search(evolution, generations, f"{target.name}, {about}", write)


Made = tuple[Any, Callable[[data.Rows], Any], str, Callable[[Candidate], None]]
"""The space, the fitness on a text, what is searched in words, and what writes a candidate."""


def _divergence(options: EvopressOptions, target: Any, compress: Compress) -> Callable[[data.Rows], Divergence]:
    return lambda rows: Divergence(
        target.lm, target.params, compress, rows, options.fitness, options.top_k or 10, options.batch_size
    )


def _drops(options: EvopressOptions, target: Any, how: Published) -> Made:
    layers = target.lm.config.layers
    if not 0 < how.budget < 1:
        raise ValueError(f"--budget is the share of layers that lose a part, between 0 and 1, got {how.budget:g}")
    legal = [(i > 0 and one.mixer is not None, i > 0 and one.feed is not None) for i, one in enumerate(layers)]
    if options.legal is not None:
        allowed = read_drops(options.legal)
        if len(allowed) != len(layers):
            raise ValueError(f"{options.legal} has {len(allowed)} lines, and {target.name} has {len(layers)} layers")
        if any(
            asked and not own for pair in zip(allowed, legal, strict=True) for asked, own in zip(*pair, strict=True)
        ):
            raise ValueError(
                f"{options.legal} allows a part of the first layer, which `swift` needs, or one that a layer lacks: "
                "leave it out"
            )
        legal = list(allowed)
    space = Drops(int(how.budget * len(layers)), tuple(zip(*legal, strict=True)), options.mutations)  # pyrefly: ignore

    def compress(candidate: Candidate) -> tuple[Any, Any]:
        return target.params, jnp.asarray(np.asarray(candidate, bool).T)

    about = f"{space.count} of {len(layers)} attentions and {space.count} feed-forwards are left out"
    write = lambda candidate: write_drops(options.output, [(bool(a), bool(b)) for a, b in zip(*candidate, strict=True)])
    return space, _divergence(options, target, compress), about, write


def _bits(options: EvopressOptions, target: Any, how: Published) -> Made:
    levels = tuple(sorted({*(options.levels or (4, 8))}))
    if lacking := [level for level in levels if level not in BITS]:
        raise ValueError(f"--levels: there is no format of {lacking[0]} bits; choose from {', '.join(map(str, BITS))}")
    found = {
        name: leaf for name, leaf in matrices(target.params).items() if name not in ("model.embed_tokens", "lm_head")
    }
    if not found:
        raise ValueError(f"{target.name} has no matrices under the names of Llama's tensors: choose another target")
    groups = grouped({name: leaf.size for name, leaf in found.items()}, options.group or "size")
    sizes = tuple(tuple(found[name].size for name in group) for group in groups)
    space = Levels(levels, sizes, how.budget, options.group == "none", options.mutations)
    at = {name: (i, j) for i, group in enumerate(groups) for j, name in enumerate(group)}
    forms = {level: read_format(BITS[level]) for level in levels}
    for form in forms.values():
        if form is not None:
            form.check(target.params)
    stores = functools.cache(lambda: [_rounded(form, target.params) for form in forms.values()])

    def compress(candidate: Candidate) -> tuple[Any, Any]:
        def one(path: Any, leaf: Any, *own: Any) -> Any:
            place = at.get(matrix_name(path) or "")
            return leaf if place is None else own[levels.index(candidate[place[0]][place[1]])]

        return jax.tree_util.tree_map_with_path(one, target.params, *stores()), None

    def write(candidate: Candidate) -> None:
        lines = []
        for name, (group, unit) in sorted(at.items(), key=lambda own: order(own[0])):
            experts = range(found[name].shape[0]) if "{}" in name else (None,)
            lines += [f"{name if i is None else name.format(i)}: {candidate[group][unit]}\n" for i in experts]
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        replace(options.output, ["".join(lines).encode()])

    about = f"{how.budget:g} bits for each of {sum(map(sum, sizes))} numbers of {len(at)} matrices"
    return space, _divergence(options, target, compress), about, write


def _cache(options: EvopressOptions, target: Any, how: Published) -> Made:
    policy = make_old(options.cache or "ems")
    if not isinstance(policy, EMS):
        raise ValueError(f"--cache {options.cache!r} has no budget for each layer: choose ems")
    if policy.budgets or policy.budget != EMS().budget:
        raise ValueError("--cache: budgets are what is searched, so leave budget and budgets out, and give --budget")
    budget, count = how.budget, len(kept_layers(target.lm.config))
    levels = tuple(sorted({*(options.levels or (int(budget / 2), int(budget), int(budget * 1.5)))}))
    space = Levels(levels, ((1,) * count,), budget, mutations=options.mutations)
    policies = tuple(dataclasses.replace(policy, budget=level, budgets=()) for level in levels)
    dataclasses.replace(target.lm, old=policies[0])  # says what such a cache cannot be of
    top = (options.top_k or 10) if options.fitness == "sparse_kl" else None

    def measured(rows: data.Rows) -> CacheDivergence:
        texts = conversations(rows, policy.recent + levels[0] + policy.chunk + 1)
        made = CacheDivergence(target.lm, target.params, policies, levels, texts, top, options.batch_size)
        made.check_rounds([*how.tokens, how.initial[1]])
        return made

    def write(candidate: Candidate) -> None:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        replace(options.output, [f"{extended(options.cache or 'ems', f'budgets={spelt(candidate[0])}')}\n".encode()])

    about = f"{budget:g} older tokens for each of {count} layers"
    return space, measured, about, write


def _rounded(form: Any, params: Any) -> Any:
    """Parameters whose matrices have the numbers of a format, as plain arrays; None: as they are."""
    if form is None:
        return params
    back = lambda x, own: plain(x, own.dtype) if is_quantised(x) else x
    return jax.tree.map(back, form.params(params), params, is_leaf=is_quantised)


def order(name: str) -> tuple[Any, ...]:
    """Sorts matrices as EvoPress does: by layer, then by name.

    >>> sorted(["model.layers.10.mlp.up_proj", "model.layers.9.self_attn.k_proj", "model.layers.9.mlp.up_proj"], key=order)
    ['model.layers.9.mlp.up_proj', 'model.layers.9.self_attn.k_proj', 'model.layers.10.mlp.up_proj']
    """
    _, _, layer, *rest = name.split(".")
    return int(layer), *rest


def grouped(sizes: dict[str, int], rule: str) -> list[list[str]]:
    """Matrices in groups, between whose members bits may move.

    Args:
      sizes: by name, how many numbers each has.
      rule: `size` for matrices of one size, `name` for those of one name, `none` for all.

    >>> grouped({"model.layers.0.mlp.up_proj": 6, "model.layers.0.mlp.down_proj": 6, "model.layers.0.mlp.gate_proj": 4}, "size")
    [['model.layers.0.mlp.down_proj', 'model.layers.0.mlp.up_proj'], ['model.layers.0.mlp.gate_proj']]
    """
    found: dict[Any, list[str]] = {}
    for name in sorted(sizes, key=order):
        key = {"size": sizes[name], "name": name.rpartition(".")[2], "none": None}[rule]
        found.setdefault(key, []).append(name)
    return list(found.values())


def _use(options: EvopressOptions) -> str:
    if options.what == CACHE:
        return f'--decode "plain:cache=($(cat {options.output}))"'
    return f"--drafter swift:layers={options.output}" if options.what == DROPS else f"--weights {options.output}"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[float], None]]:
    """A bar on stderr if that is a terminal; the function takes a generation's fitness."""
    if not bar_fits():
        yield lambda own: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("generations"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda own: progress.update(task, advance=1, description=f"fitness {own:.5f}")
