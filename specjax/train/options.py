"""Options of `specjax train`, `specjax train hmm`, `specjax train evopress` and `specjax capture`."""

import dataclasses
from typing import Any, Literal

from specjax.jobs.options import HostOptions
from specjax.serve.options import ModelOptions, option, same

LENGTH = 256
COMPUTE_DTYPES = ("float32", "bfloat16")
"""The types allowed for a head's products. float16 would need scaled gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(HostOptions):
    """Options of `specjax train`; see the help of each."""

    drafter: str = option(
        dataclasses.MISSING,
        "name:field=value,... with one of these names: {objectives}",
        metavar="DRAFTER",
        positional=True,
    )
    target: str | None = option(None, "folder, shipped name or hub id (default: the shipped target)")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    data: tuple[str, ...] = option((), ".jsonl, .txt or .py files, or folders of them", nargs="+", metavar="FILE")
    prompts: str | None = option(
        None, "instead of --data: lines as in generate --input; the target first draws answers from its own distribution",
        metavar="FILE.jsonl",
    )  # fmt: skip
    max_new_tokens: int = option(256, "most tokens of each answer to --prompts", metavar="N", least=1)
    features: str | None = option(
        None, "instead of --data: what `specjax capture` wrote, so the target does not run", metavar="FOLDER"
    )
    held_out: tuple[str, ...] = option(
        (), "text (or captured text) that is not trained on; it is read at every checkpoint, and the best one is written",
        nargs="+",
        metavar="FILE",
    )  # fmt: skip
    patience: int | None = option(
        None, "end after N checkpoints without a better one on the held-out text", metavar="N", least=1
    )
    output: str = option(
        dataclasses.MISSING, "where to write the parameters, with `training/` beside them", metavar="FOLDER"
    )
    draft: str | None = option(
        None,
        "distill, lm, s2d, pard, pard2, gad: the model to start from; acceptance: the model that drafts",
        metavar="MODEL",
    )
    draft_config: str | None = option(
        None, "distill, lm, s2d, any_subset: the config.json of a small new model", metavar="FILE"
    )
    reference: str | None = option(
        None, "distill with keep below 1: an already distilled copy of the start", metavar="MODEL"
    )
    draft_vocabulary: int | None = option(
        None, "heads: the draft knows only the data's N most frequent tokens", metavar="N"
    )
    start: str | None = option(
        None,
        "heads: start from this head (folder, shipped name or hub id; ours or in a published layout)",
        metavar="HEAD",
    )
    loss: str | None = option(
        None, "name:field=value,... with one of these names: {losses} (default: the drafter's own)"
    )
    steps: int = option(1000, "number of updates")
    batch_size: int = option(8, "rows per update", least=1)
    accumulate: int = option(1, "parts into which a batch is split to save memory; same result")
    length: int | None = option(None, "tokens per row (default: 256, or those of --features)", least=2)
    learning_rate: float = option(3e-4, "highest learning rate; it falls to 0 as a cosine")
    warmup: int | None = option(None, "steps to the highest learning rate (default: a twentieth of all)")
    weight_decay: float | None = option(None, "weight decay of AdamW (default: the drafter's own)")
    clip: float | None = option(None, "largest gradient norm, or gradient entry (default: the drafter's own)")
    clip_by: str | None = option(
        None, "clip the norm or each entry (default: the drafter's own)", choices=("norm", "value")
    )
    seed: int = option(0, "seed of parameters, data order and samples")
    checkpoint_every: int = option(
        500, "steps between checkpoints; the latest two and the best are kept", metavar="STEPS", least=1
    )
    resume: bool = option(False, "continue the run in --output exactly from its last checkpoint")
    dtype: str | None = option(
        None, "type of the target: float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)"
    )
    weights: str | None = option(None, "format of the target, which is not trained; as in generate", metavar="FORMAT")
    compute_dtype: str | None = option(
        None, "heads: type of products; parameters and moments are float32 (default: float32 on a CPU, bfloat16 elsewhere)",
        choices=COMPUTE_DTYPES,
    )  # fmt: skip
    save_dtype: str = option("float32", "type of the parameters on disk")
    mesh: str | None = option(None, "devices by axis, such as data=2,model=4 (default: one device)")
    plot: str | None = option(None, "write a picture of the loss", metavar="FILE.png")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureOptions(HostOptions):
    """Options of `specjax capture`; see the help of each."""

    drafter: str = option(
        dataclasses.MISSING, "the head to be trained, as in train; the layers that it reads are captured", metavar="DRAFTER",
        positional=True,
    )  # fmt: skip
    target: str | None = same(TrainOptions, "target")
    adapter: tuple[str, ...] = same(TrainOptions, "adapter")
    data: tuple[str, ...] = same(TrainOptions, "data")
    prompts: str | None = same(TrainOptions, "prompts")
    max_new_tokens: int = same(TrainOptions, "max_new_tokens")
    output: str = option(
        dataclasses.MISSING, "where to write the features; the same command resumes a killed run", metavar="FOLDER"
    )
    top_k: int | None = option(
        None, "keep the N likeliest tokens of each distribution, instead of the final features, which give all of them",
        metavar="N", least=1,
    )  # fmt: skip
    length: int = option(LENGTH, "tokens per row", least=2)
    batch_size: int = option(8, "rows that the target reads at a time", least=1)
    rows_per_file: int | None = option(None, "rows per file (default: batches up to 256 MiB)", metavar="N", least=1)
    seed: int = option(0, "seed of the order of rows, and of the answers to --prompts")
    dtype: str | None = same(TrainOptions, "dtype")
    weights: str | None = option(None, "format of the target, as in generate", metavar="FORMAT")
    save_dtype: str = option("bfloat16", "type of the features on disk")
    mesh: str | None = same(TrainOptions, "mesh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HmmOptions:
    """Options of `specjax train hmm`; see the help of each."""

    target: str | None = option(None, "the model whose texts are learned: folder, shipped name or hub id")
    data: tuple[str, ...] = same(TrainOptions, "data")
    prompts: str | None = same(TrainOptions, "prompts")
    max_new_tokens: int = same(TrainOptions, "max_new_tokens")
    output: str = option(
        dataclasses.MISSING, "where to write the hidden Markov model; replaces an older one", metavar="FOLDER"
    )
    states: int = option(64, "number of hidden states", least=1)
    rounds: int = option(30, "how often all texts are read", least=1)
    tolerance: float = option(1e-4, "end when a round raises the log-likelihood of a token by less, in nats")
    length: int | None = option(
        None, "most tokens of a text with its prompt; longer ones are cut (default: 256)", least=2
    )
    batch_size: int = option(32, "texts that are read, or written, at a time", least=1)
    seed: int = option(0, "seed of the first parameters, and of the answers to --prompts")
    dtype: str | None = same(TrainOptions, "dtype")
    weights: str | None = same(TrainOptions, "weights")
    mesh: str | None = option(None, "devices that write the answers to --prompts, as in generate")


DROPS = "drops"
CACHE = "cache"
"""The search for sublayers to leave out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvopressOptions:
    """Options of `specjax train evopress`; see the help of each."""

    what: str = option(
        dataclasses.MISSING,
        "what is searched: drops, sublayers that a draft leaves out (swift:layers=FILE); bits, of each matrix "
        "(--weights FILE); cache, how many older tokens each layer keeps (ems:budgets=...)",
        choices=(DROPS, "bits", CACHE),
        positional=True,
    )
    target: str | None = option(None, "the model: folder, shipped name or hub id (default: the shipped target)")
    data: tuple[str, ...] = same(TrainOptions, "data")
    prompts: str | None = same(TrainOptions, "prompts")
    max_new_tokens: int = same(TrainOptions, "max_new_tokens")
    output: str = option(
        dataclasses.MISSING, "the file to write, after every generation; replaces an older one", metavar="FILE"
    )
    budget: float | None = option(
        None, "drops: the share of layers that lose their attention, and of those that lose their feed-forward (default: "
        "0.25); bits: of a number, on average (default: 6); cache: tokens of a layer, on average (default: 256)",
    )  # fmt: skip
    legal: str | None = option(
        None, "drops: a list like the output, of sublayers that may be left out (default: all but the first layer's)",
        metavar="FILE",
    )  # fmt: skip
    levels: tuple[int, ...] = option(
        (), "bits: those that a matrix may have, of 4, 8 and 16, in equal steps (default: 4 8); cache: budgets that a layer "
        "may have, in equal steps (default: a half, all and three halves of the budget)", nargs="+", metavar="N",
    )  # fmt: skip
    cache: str | None = option(None, "cache: the policy, and its fields but for budgets (default: ems)", metavar="LINE")
    group: str | None = option(
        None, "bits: between which matrices bits may move: of one size, of one name, or all (default: size)",
        choices=("size", "name", "none"),
    )  # fmt: skip
    fitness: Literal["kl", "sparse_kl", "perplexity"] = option(
        "kl", "what is least: divergence from the whole model, the same over its likeliest tokens, or perplexity",
        choices=("kl", "sparse_kl", "perplexity"),
    )  # fmt: skip
    top_k: int | None = option(None, "sparse_kl: how many of the likeliest tokens (default: 10)", metavar="N", least=2)
    generations: int | None = option(
        None, "how many (default: of n layers that lose k, k(n-k)/1.5; bits, cache: 150)", metavar="N", least=1
    )
    offspring: int | None = option(None, "children of a generation (default: 32; bits: 128)", metavar="N", least=1)
    survivors: tuple[int, ...] = option(
        (), "how many each round of selection keeps (default: 2 1; bits: 16 4 1; cache: 4 1)", nargs="+", metavar="N"
    )
    tokens: tuple[int, ...] = option(
        (), "tokens that each candidate reads in each round (default: 2048 32768; bits: 2048 16384 131072; cache: 2048 "
        "16384)", nargs="+",
        metavar="N",
    )  # fmt: skip
    initial: int | None = option(None, "random candidates to begin with (default: 64)", metavar="N", least=1)
    initial_tokens: int | None = option(None, "tokens that each of these reads (default: 2048)", metavar="N", least=2)
    mutations: int = option(3, "most changes of a child", metavar="N", least=1)
    length: int | None = option(None, "tokens per sequence (default: 256)", least=2)
    batch_size: int = option(8, "sequences that are read, or texts written, at a time", least=1)
    seed: int = option(0, "seed of the search, of the text's order and of the answers to --prompts")
    dtype: str | None = same(TrainOptions, "dtype")
    mesh: str | None = option(None, "devices that write the answers to --prompts, as in generate")


def length_of(options: Any) -> int:
    """Tokens per row, as requested or the default."""
    return LENGTH if options.length is None else options.length
