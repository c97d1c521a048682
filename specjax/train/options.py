"""Options of `specjax train` and `specjax capture`."""

import dataclasses
from typing import Any

from specjax.jobs.options import HostOptions
from specjax.serve.options import ModelOptions, option, same

LENGTH = 256
COMPUTE_DTYPES = ("float32", "bfloat16")
"""In which a head's products may be. float16 would need its gradients scaled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(HostOptions):
    """See the help of each."""

    drafter: str = option(
        dataclasses.MISSING, "name:field=value,... of {objectives}", metavar="DRAFTER", positional=True
    )
    target: str | None = option(None, "folder, shipped name or hub id (default: the shipped target)")
    adapter: str | None = same(ModelOptions, "adapter")
    data: tuple[str, ...] = option((), ".jsonl, .txt or .py files, or folders of them", nargs="+", metavar="FILE")
    prompts: str | None = option(
        None, "in place of --data: lines as of generate --input, which the target answers first, by its own distribution",
        metavar="FILE.jsonl",
    )  # fmt: skip
    max_new_tokens: int = option(256, "tokens of each of these answers, at most", metavar="N", least=1)
    features: str | None = option(
        None, "in place of --data: what `specjax capture` wrote, so that the target does not run", metavar="FOLDER"
    )
    held_out: tuple[str, ...] = option(
        (), "text of the same kinds, or captured, that is not trained on, read at every checkpoint; the best one is written",
        nargs="+",
        metavar="FILE",
    )  # fmt: skip
    patience: int | None = option(
        None, "end after so many checkpoints without a better one on the held-out text", metavar="N", least=1
    )
    output: str = option(dataclasses.MISSING, "for the parameters, and `training/` beside them", metavar="FOLDER")
    draft: str | None = option(
        None, "distill: the small model to start from; acceptance: the one that drafts", metavar="MODEL"
    )
    draft_config: str | None = option(
        None, "distill: a config.json of a small model to start from nothing", metavar="FILE"
    )
    reference: str | None = option(
        None, "distill with keep below 1: an already distilled copy of the start", metavar="MODEL"
    )
    draft_vocabulary: int | None = option(
        None, "heads: the draft knows the data's N most frequent tokens only", metavar="N"
    )
    start: str | None = option(
        None,
        "heads: go on from this one (folder, shipped name or hub id), ours or of a published layout",
        metavar="HEAD",
    )
    loss: str | None = option(None, "name:field=value,... of {losses} (default: the drafter's own)")
    steps: int = option(1000, "updates")
    batch_size: int = option(8, "rows an update", least=1)
    accumulate: int = option(1, "parts that a batch is split into to save memory; same result")
    length: int | None = option(None, "tokens a row (default: 256, or those of --features)", least=2)
    learning_rate: float = option(3e-4, "the highest; it falls to 0 as a cosine")
    warmup: int | None = option(None, "steps until then (default: a twentieth of all)")
    weight_decay: float | None = option(None, "of AdamW (default: the drafter's own)")
    clip: float | None = option(None, "largest norm of a gradient, or entry (default: the drafter's own)")
    clip_by: str | None = option(None, "what is clipped (default: the drafter's own)", choices=("norm", "value"))
    seed: int = option(0, "of parameters, data order and samples")
    checkpoint_every: int = option(
        500, "the latest two checkpoints are kept, and the best one", metavar="STEPS", least=1
    )
    resume: bool = option(False, "go on with the run in --output exactly where its last checkpoint was")
    dtype: str | None = option(
        None, "of the target: float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)"
    )
    weights: str | None = option(
        None, "of the target, which is not trained: kept in few bits, as of generate", metavar="FORMAT"
    )
    compute_dtype: str | None = option(
        None, "heads: of their products; parameters and moments are float32 (default: float32 on a CPU, else bfloat16)",
        choices=COMPUTE_DTYPES,
    )  # fmt: skip
    save_dtype: str = option("float32", "of the parameters on disk")
    mesh: str | None = option(None, "devices by axis, such as data=2,model=4 (default: one device)")
    plot: str | None = option(None, "write a picture of the loss", metavar="FILE.png")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureOptions(HostOptions):
    """Options of `specjax capture`; see the help of each."""

    drafter: str = option(
        dataclasses.MISSING, "the head that is to be trained, as of train: its layers are captured", metavar="DRAFTER",
        positional=True,
    )  # fmt: skip
    target: str | None = same(TrainOptions, "target")
    adapter: str | None = same(TrainOptions, "adapter")
    data: tuple[str, ...] = same(TrainOptions, "data")
    prompts: str | None = same(TrainOptions, "prompts")
    max_new_tokens: int = same(TrainOptions, "max_new_tokens")
    output: str = option(
        dataclasses.MISSING, "for the features; after a kill the same command goes on where it was", metavar="FOLDER"
    )
    top_k: int | None = option(
        None, "keep of the target's distributions the N likeliest tokens, not the final features that all of them follow from",
        metavar="N", least=1,
    )  # fmt: skip
    length: int = option(LENGTH, "tokens a row", least=2)
    batch_size: int = option(8, "rows that the target reads at a time", least=1)
    rows_per_file: int | None = option(None, "rows a file (default: batches up to 256 MiB)", metavar="N", least=1)
    seed: int = option(0, "of the order of rows, and of answers to --prompts")
    dtype: str | None = same(TrainOptions, "dtype")
    weights: str | None = option(None, "of the target: kept in few bits, as of generate", metavar="FORMAT")
    save_dtype: str = option("bfloat16", "of the features on disk")
    mesh: str | None = same(TrainOptions, "mesh")


def length_of(options: Any) -> int:
    """Tokens a row, as asked for or as usual."""
    return LENGTH if options.length is None else options.length
