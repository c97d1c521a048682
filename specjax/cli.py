"""The `specjax` command. Slow imports happen where they are used, so that `--help` and errors come quickly.

For the exit status see `specjax.terminal`.
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import specjax
from specjax import models as folders
from specjax import names
from specjax.assembly.line import spelt
from specjax.bench import check_head
from specjax.bench import command as bench
from specjax.bench.check_head import CheckHeadOptions
from specjax.bench.options import BenchOptions
from specjax.completion import CompletionOptions, script
from specjax.evaluate import command as evaluation
from specjax.evaluate.options import EvalOptions
from specjax.helps import HELPS
from specjax.jobs import convert, datastore, generate, score
from specjax.jobs.convert import ConvertOptions
from specjax.jobs.datastore import DatastoreOptions
from specjax.jobs.options import JobOptions
from specjax.jobs.score import ScoreOptions
from specjax.models import tensors
from specjax.models.gguf.finding import PACKAGES
from specjax.objectives.losses import LOSSES
from specjax.plan import command as plan
from specjax.plan import training as plan_training
from specjax.plan.command import PlanOptions
from specjax.plan.training import PlanTrainOptions
from specjax.serve.options import option
from specjax.terminal import BadInput, Parser, add_fields, bad_input, from_args, run_command, write
from specjax.train.options import CaptureOptions, EvopressOptions, HmmOptions, TrainOptions
from specjax.train.trainable import trainable


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a command that has none."""


@dataclasses.dataclass(frozen=True)
class DraftersOptions:
    """Options of `specjax drafters`; see the help of each."""

    model: str | None = option(None, "print as JSON how the head named by --drafter is read for this target")
    drafter: str | None = option(None, "with --model: the drafter's line, such as eagle3:model=FOLDER", metavar="LINE")


def drafters(options: DraftersOptions) -> int:
    """`specjax drafters`."""
    from specjax.assembly.registry import DRAFTERS, RULES

    if options.model is not None or options.drafter is not None:
        return _describe(options)
    _list_entries(DRAFTERS)
    write("rule=NAME,length=8,... for a drafter with an expander\n")
    return _list_entries(RULES)


def _describe(options: DraftersOptions) -> int:
    """One record: the shape of the drafter's head for the model."""
    from specjax.assembly.heads import named_head, record
    from specjax.decode.lines import read_drafter

    if options.model is None or options.drafter is None:
        raise BadInput("give --model and --drafter together: a head is read for a target")
    with bad_input():
        line = str(read_drafter(options.drafter).drafter)
        write(json.dumps(record(*named_head(line, folders.load(options.model)))) + "\n")
    return 0


def verifiers(options: NoOptions) -> int:
    """`specjax verifiers`."""
    from specjax.assembly.registry import VERIFIERS

    return _list_entries(VERIFIERS)


def samplers(options: NoOptions) -> int:
    """`specjax samplers`."""
    from specjax.assembly.registry import MIXERS, WARPERS

    _list_entries(WARPERS, flags=True)
    write("--decode, what is read in a token's place while a row thinks (soft thinking)\n")
    return _list_entries(MIXERS)


def constraints(options: NoOptions) -> int:
    """`specjax constraints`."""
    from specjax.assembly.registry import aligned
    from specjax.constrain.kinds import DISTRIBUTIONS, GUARANTEES, KINDS, PLACES

    rows = [(name, own.place, own.guarantee, f"{own.summary} [{own.source}]") for name, own in KINDS.items()]
    for line, own in zip(_aligned(rows), KINDS.values(), strict=True):
        write(f"{line}\n    {', '.join(own.forms)}\n    {own.serves}\n")
    for word, said in {**PLACES, **GUARANTEES}.items():
        write(f"{word}: {said}\n")
    write("--decode, or an option in --sampling: how texts are distributed\n")
    for name, word in aligned().items():
        write(f"{name}: {word}, {DISTRIBUTIONS[word]}\n")
    return 0


def searches(options: NoOptions) -> int:
    """`specjax searches`."""
    from specjax.assembly.registry import SEARCHES, SELECTIONS, STEPWISE
    from specjax.decode.lines import DECODES
    from specjax.decode.steer import STEERS

    write("--decode\n")
    _list_entries(
        {name: DECODES[name] for name in ("plain", "speculate", "diffusion", "soft_thinking", "route", "hedged")}
    )
    _list_entries({**SEARCHES, **STEPWISE})
    write("steer=(NAME:FIELD=VALUE,...) for plain, speculate, soft_thinking, and for every drafter\n")
    _list_entries(STEERS)
    write("--select, of several completions\n")
    return _list_entries(SELECTIONS)


def _list_entries(table: dict[str, Any], flags: bool = False) -> int:
    """One line per method; below it, indented, a line that sets each of its fields to the default, or its options in
    --sampling.

    A flag or field is shown in brackets if its default is no value or has several lines.
    """
    rows, guaranteed = [], any(entry.guarantee for entry in table.values())
    for name, entry in table.items():
        worth = [entry.guarantee or "-"] if guaranteed else []
        rows.append((name, *worth, f"{entry.summary} [{entry.source}]"))
    for (name, entry), line in zip(table.items(), _aligned(rows), strict=True):
        if flags:
            shown = lambda own, value: f"[{own}=...]" if value is None else f"{own}={json.dumps(value)}"
            fields = ",".join(shown(field, value) for field, value in entry.listed.items())
        else:
            fields = f"{name}:" + ",".join(_field(*own) for own in entry.listed.items())
        write(f"{line}\n" + (f"    {fields}\n" if entry.listed else ""))
    return 0


def _field(name: str, value: Any) -> str:
    return f"[{name}=...]" if value in (None, "") or "\n" in str(value) else f"{name}={spelt(value)}"


def policies(options: NoOptions) -> int:
    """`specjax policies`."""
    from specjax.assembly.registry import CACHES, OLDS, SAMPLERS, UNMASKS

    write("--decode NAME:...,cache=NAME\n")
    _list_entries(UNMASKS)
    write("--decode, for models without a mask\n")
    _list_entries(SAMPLERS)
    write("cache=NAME, for diffusion models\n")
    _list_entries(CACHES)
    write("cache=NAME, for autoregressive models\n")
    return _list_entries(OLDS)


def models(options: NoOptions) -> int:
    """`specjax models`."""
    rows = []
    with bad_input():
        for name, folder in folders.shipped().items():
            config = json.loads((folder / "config.json").read_text())
            count = sum(math.prod(tensor.shape) for tensor in tensors.read_folder(folder).values())
            shape = f"{config['num_hidden_layers']} layers of width {config['hidden_size']}"
            about = f"{config['model_type']}, {shape}, vocabulary {config['vocab_size']}"
            rows.append((name, f"{count / 1e6:.2f}M parameters", f"{about} [{folder}]"))
        for name, package in PACKAGES.items():
            rows.append((name, "in a package", f"{package.about} [{(package.parts() or [package.command])[0]}]"))
    write("".join(f"{line}\n" for line in _aligned(rows)))
    return 0


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def train(options: TrainOptions) -> int:
    """`specjax train`."""
    from specjax.train.command import command  # grain, optax and orbax are slow to import

    return command(options)


def train_hmm(options: HmmOptions) -> int:
    """`specjax train hmm`."""
    from specjax.train.hmm import command  # slow to import too

    return command(options)


def train_evopress(options: EvopressOptions) -> int:
    """`specjax train evopress`."""
    from specjax.train.evopress.command import command  # slow to import too

    return command(options)


def capture(options: CaptureOptions) -> int:
    """`specjax capture`."""
    from specjax.train.capture import command  # slow to import too

    return command(options)


def completion(options: CompletionOptions) -> int:
    """`specjax completion`."""
    write(script({name: parser_of(name, whole=True) for name in COMMANDS}, options.shell))
    return 0


WORDS = {"objectives": ", ".join(trainable()), "losses": ", ".join(LOSSES)}
"""The values of names in help texts."""

COMMANDS: dict[str, tuple[str, type, Callable[[Any], int]]] = {
    "generate": ("complete prompts", JobOptions, generate.command),
    "score": ("compute the log-probabilities of continuations", ScoreOptions, score.command),
    "bench": ("compare drafters with plain decoding: speed, tokens per step, same text", BenchOptions, bench.command),
    "eval": ("compare decoders by right answers and speed on verifiable tasks", EvalOptions, evaluation.command),
    "check-head": (
        "report how a head is read for a target, and how many of its drafts are accepted",
        CheckHeadOptions,
        check_head.command,
    ),
    "train": ("train a drafter for a target, or a model on text", TrainOptions, train),
    "train hmm": (
        "learn a hidden Markov model of a model's texts, which guides texts of constraints",
        HmmOptions,
        train_hmm,
    ),
    "train evopress": (
        "search which sublayers a draft leaves out, the bits of each matrix, or the cache of each layer",
        EvopressOptions,
        train_evopress,
    ),
    "capture": (
        "store a target's outputs on training text, so that heads are trained without running it",
        CaptureOptions,
        capture,
    ),
    "datastore": ("build a retrieval datastore from text files", DatastoreOptions, datastore.command),
    "convert": (
        "write a model as an Orbax checkpoint or in another type, or a head for other engines",
        ConvertOptions,
        convert.command,
    ),
    "plan": (
        "compile a step for a TPU slice or an H100 machine without having it, and report its cost",
        PlanOptions,
        plan.command,
    ),
    "plan train": (
        "plan an update that trains a head, in the same way",
        PlanTrainOptions,
        plan_training.command,
    ),
    "drafters": (
        "list the drafters (what they do, source, fields), or describe one for a model",
        DraftersOptions,
        drafters,
    ),
    "verifiers": ("list the verifiers: what they do, source, fields", NoOptions, verifiers),
    "samplers": (
        "list the parts of a sampler in the order that they act: what they do, source, options",
        NoOptions,
        samplers,
    ),
    "constraints": (
        "list the kinds of constraints: what they serve, where they are followed, what they guarantee",
        NoOptions,
        constraints,
    ),
    "searches": ("list the searches and selections: what they do, source, options", NoOptions, searches),
    "policies": ("list the unmask and cache policies of diffusion models", NoOptions, policies),
    "models": ("list the models that have a name", NoOptions, models),
    "completion": ("print a script with which a shell completes these commands", CompletionOptions, completion),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _dispatch(words))


def parser_of(name: str, whole: bool = False) -> Parser:
    """The parser of a command; its help shows all options, or only the usual ones."""
    about, options, _ = COMMANDS[name]
    described = about[0].upper() + about[1:] + "."
    parser = Parser(lambda: parser_of(name, whole=True), prog=f"specjax {name}", description=described)
    add_fields(parser, options, WORDS, HELPS[name], whole)
    left = parser.left_out
    more = f"`{parser.prog} --help all` shows {len(left)} more options: {', '.join(left)}\n\n" if left else ""
    parser.epilog = f"{more}examples:\n" + "\n".join(f"  {line}" for line in HELPS[name].examples)
    return parser


def _dispatch(words: list[str]) -> int:
    listing = "\n".join(f"  {name:10} {about}" for name, (about, _, _) in COMMANDS.items())
    top = Parser(prog="specjax", usage="specjax COMMAND ...", description="Fast language-model decoding in JAX.")
    top.epilog = (
        f"commands:\n{listing}\n\n`specjax COMMAND --help` lists a command's usual options, `--help all` all of them."
    )
    top.add_argument("--version", action="store_true", help="print the version")
    if not words or words[0].startswith("-"):
        with _help_exits():
            if top.parse_args(words).version:
                write(f"specjax {specjax.__version__}\n")
                return 0
            top.error("give a command: " + ", ".join(COMMANDS))
        return 0
    count = 2 if " ".join(words[:2]) in COMMANDS else 1
    name = " ".join(words[:count])
    if name not in COMMANDS:
        top.error(names.wrong_command(name, list(COMMANDS)))
    _, options, command = COMMANDS[name]
    parser = parser_of(name)
    rest = words[count:]
    cut = rest.index("--") if "--" in rest else len(rest)  # intermixed parsing would drop what follows
    args = None
    with _help_exits():
        args = parser.parse_intermixed_args(rest[:cut])
    if args is None:
        return 0
    if rest[cut + 1 :]:
        if not isinstance(getattr(args, "prompts", None), list):
            parser.error(f"unrecognized arguments: {' '.join(rest[cut + 1 :])}")
        args.prompts += rest[cut + 1 :]
    args.words = words
    return command(from_args(options, args))


@contextlib.contextmanager
def _help_exits() -> Iterator[None]:
    """Around parsing: argparse prints the help and exits; here that only ends the parsing."""
    try:
        yield
    except SystemExit as done:
        if done.code:
            raise
